using System;
using System.Globalization;

class Consume {
    static void Main() {
        float[] x = new float[2 * 64], output = new float[2 * 64]; // q, k and v of a model with 2 heads of 64 channels
        x[0] = 1;
        using (var kv = new TieredKV.Cache("model.n_layers = 1\nmodel.n_heads = 2\nmodel.head_dim = 64")) {
            for (int i = 0; i < 1000; i++) {
                kv.Append(0, 0, x, x);
                kv.Attend(0, 0, x, output);
            }
            var mem = kv.Memory();
            Console.WriteLine("{0} hot, {1} warm, {2} archive, {3} bytes, out {4}", mem.tier[0].tokens, mem.tier[1].tokens,
                              mem.tier[2].tokens, mem.total, output[0].ToString("F1", CultureInfo.InvariantCulture));
        }
    }
}
