package tieredkv

import (
	"strings"
	"testing"
)

// What a caller gets wrong is an error, and leaves the tokens as they were.
func TestRefusals(t *testing.T) {
	if _, err := New("model.n_layers = 1\nmodel.n_heads = 2\nmodel.head_dims = 64"); err == nil || !strings.Contains(err.Error(), "line 3") {
		t.Fatalf("a wrong key: %v", err)
	}
	kv, err := New("model.n_layers = 1\nmodel.n_heads = 2\nmodel.head_dim = 64")
	if err != nil {
		t.Fatal(err)
	}
	x, out := make([]float32, 2*64), make([]float32, 2*64)
	if err := kv.Append(0, 0, x, x); err != nil {
		t.Fatal(err)
	}
	far := 1 << 16
	far *= far // more than an int of C has; 0 where an int of Go has as few bits
	if far != 0 {
		if kv.Append(far, 0, x, x) == nil || kv.Attend(far, 0, x, out) == nil || kv.Reset(far) == nil || kv.Fork(0, far, 1) == nil {
			t.Error("a sequence beyond an int of C is taken")
		}
		if err := kv.Truncate(0, far); err != nil {
			t.Error(err)
		}
		if n := kv.Len(far, 0); n != 0 {
			t.Errorf("a sequence beyond an int of C has %d tokens", n)
		}
	}
	if kv.Append(0, 0, x[1:], x) == nil || kv.Append(0, 0, x, nil) == nil || kv.Append(0, 1, x, x) == nil || kv.Attend(0, -1, x, out) == nil {
		t.Error("a wrong length or layer is taken")
	}
	if n := kv.Len(0, AllLayers); n != 1 {
		t.Errorf("%d tokens, not 1", n)
	}
	kv.Close()
	kv.Close()
	if _, err := kv.Memory(); err == nil || kv.Append(0, 0, x, x) == nil || kv.Len(0, 0) != 0 {
		t.Error("a closed cache answers")
	}
}
