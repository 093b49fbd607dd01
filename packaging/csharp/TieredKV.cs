// TieredKV.cs - the cache for C#, by P/Invoke. Copy this file into your program, with the shared library beside it:
//
//   cc -O2 -shared -fPIC examples/tieredkv.c -o libtieredkv.so -lm        (or CMake with -DBUILD_SHARED_LIBS=ON)
//
// It is libtieredkv.dylib on macOS and tieredkv.dll on Windows.
//
//   using (var kv = new TieredKV.Cache("model.n_layers = 4\nmodel.n_heads = 8\nmodel.head_dim = 64")) {
//       kv.Append(seq, layer, k, v);     // [n][n_kv_heads][head_dim] each, keys after RoPE
//       kv.Attend(seq, layer, q, output);   // both are [n][n_heads][head_dim]
//   }
//
// Keys of the config are those of the manual, chapter 6. Each error is a TieredKV.Error with the library's sentence; arrays of a
// wrong length are an ArgumentException.
using System;
using System.Collections.Concurrent;
using System.Runtime.InteropServices;
using System.Text;

namespace TieredKV {

public class Error : Exception {
    public readonly int Status;
    internal Error(int status, string text) : base(text) { Status = status; }
}

// The structs of the header, field by field. tests/test_consume.py compares their layout with the C compiler's.
[StructLayout(LayoutKind.Sequential)]
public struct tkv_tier_bytes {
    public UIntPtr tokens, codes, metadata;
}

[StructLayout(LayoutKind.Sequential)]
public struct tkv_memory_info {
    public UIntPtr total;
    [MarshalAs(UnmanagedType.ByValArray, SizeConst = 3)]
    public tkv_tier_bytes[] tier;
    public UIntPtr tables, index, scratch, exact_copies, states, slack;
    public tkv_tier_bytes offloaded;
    public UIntPtr peak, fp16_bytes;
    public double ratio, ratio_f32;
}

[StructLayout(LayoutKind.Sequential)]
public struct tkv_layer_info {
    public int n_heads, n_kv_heads, head_dim, v_head_dim, v_in_k, length;
    [MarshalAs(UnmanagedType.ByValArray, SizeConst = 3)]
    public int[] tokens;
    [MarshalAs(UnmanagedType.ByValArray, SizeConst = 3)]
    public int[] blocks;
    public int expired, offloaded, evicted, discarded, named_sinks;
    [MarshalAs(UnmanagedType.ByValArray, SizeConst = 6)]
    public int[] format;
    public tkv_memory_info memory;
}

static class Native {
    const string Library = "tieredkv";
    const CallingConvention C = CallingConvention.Cdecl;

    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_create_ex(IntPtr cfg, byte[] text, UIntPtr text_size, out IntPtr kv, byte[] reason, UIntPtr size);
    [DllImport(Library, CallingConvention = C)]
    internal static extern void tkv_destroy(IntPtr kv);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_append(Handle kv, int seq, int layer, float[] k, float[] v, int n);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_attend(Handle kv, int seq, int layer, float[] q, int n, [Out] float[] output);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_get_length(Handle kv, int seq, int layer);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_seq_fork(Handle kv, int src, int dst, int n_tokens);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_seq_truncate(Handle kv, int seq, int n_tokens);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_seq_reset(Handle kv, int seq);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_get_layer(Handle kv, int seq, int layer, out tkv_layer_info info);
    [DllImport(Library, CallingConvention = C)]
    internal static extern int tkv_get_memory(Handle kv, out tkv_memory_info info);
    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr tkv_get_last_error(Handle kv);
    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr tkv_get_status_text(int status);
}

// The tkv_cache *. The runtime frees it when the last call has ended.
sealed class Handle : SafeHandle {
    internal Handle(IntPtr kv) : base(IntPtr.Zero, true) { SetHandle(kv); }
    public override bool IsInvalid { get { return handle == IntPtr.Zero; } }
    protected override bool ReleaseHandle() {
        Native.tkv_destroy(handle);
        return true;
    }
}

// A cache of one model. Attend may run on several threads while no other method runs.
public sealed class Cache : IDisposable {
    public const int AllLayers = -3, Unlimited = -2;
    readonly Handle kv;
    readonly ConcurrentDictionary<int, tkv_layer_info> shapes = new ConcurrentDictionary<int, tkv_layer_info>();

    public Cache(string config) {
        byte[] text = Encoding.UTF8.GetBytes(config), reason = new byte[400];
        IntPtr made;
        int status = Native.tkv_create_ex(IntPtr.Zero, text, (UIntPtr)text.Length, out made, reason, (UIntPtr)reason.Length);
        if (status != 0) throw new Error(status, Encoding.UTF8.GetString(reason, 0, Array.IndexOf(reason, (byte)0)));
        kv = new Handle(made);
    }

    public void Dispose() { kv.Dispose(); }

    // k is [n][n_kv_heads][head_dim], v is [n][n_kv_heads][v_head_dim], or null where V is stored in K.
    public void Append(int seq, int layer, float[] k, float[] v) {
        tkv_layer_info l = Shape(layer);
        int n = Count(k, l.n_kv_heads * l.head_dim, v, l.v_in_k != 0 ? 0 : l.n_kv_heads * l.v_head_dim);
        CheckChange(Native.tkv_append(kv, seq, layer, k, v, n));
    }

    // q is [n][n_heads][head_dim], output is [n][n_heads][v_head_dim].
    public void Attend(int seq, int layer, float[] q, float[] output) {
        tkv_layer_info l = Shape(layer);
        Check(Native.tkv_attend(kv, seq, layer, q, Count(q, l.n_heads * l.head_dim, output, l.n_heads * l.v_head_dim), output));
    }

    public int Length(int seq, int layer = AllLayers) { return Native.tkv_get_length(kv, seq, layer); }
    public void Fork(int src, int dst, int n = Unlimited) { CheckChange(Native.tkv_seq_fork(kv, src, dst, n)); }
    public void Truncate(int seq, int n) { CheckChange(Native.tkv_seq_truncate(kv, seq, n)); }
    public void Reset(int seq) { CheckChange(Native.tkv_seq_reset(kv, seq)); }

    public tkv_layer_info Layer(int seq, int layer) {
        tkv_layer_info info;
        Check(Native.tkv_get_layer(kv, seq, layer, out info));
        return info;
    }

    public tkv_memory_info Memory() {
        tkv_memory_info info;
        Check(Native.tkv_get_memory(kv, out info));
        return info;
    }

    tkv_layer_info Shape(int layer) { return shapes.GetOrAdd(layer, i => Layer(0, i)); }

    static int Count(float[] a, int each, float[] b, int also) {
        int n = a == null ? 0 : a.Length / each;
        if (n == 0 || a.Length != n * each || (b == null ? 0 : b.Length) != (long)n * also)
            throw new ArgumentException("a token takes " + each + " and " + also + " floats");
        return n;
    }

    static void Check(int status) {
        if (status != 0) throw new Error(status, Text(Native.tkv_get_status_text(status)));
    }

    void CheckChange(int status) { // calls that change the cache leave a sentence
        string text = status == 0 ? "" : Text(Native.tkv_get_last_error(kv));
        if (text != "") throw new Error(status, text);
        Check(status);
    }

    static string Text(IntPtr text) { return Marshal.PtrToStringAnsi(text); }
}

}
