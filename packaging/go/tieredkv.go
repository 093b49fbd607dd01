// Package tieredkv holds the keys and values of a transformer in three tiers. Recent tokens are exact, and older ones are
// compressed. The comments of tieredkv.h document each call in full.
//
// CGO_CFLAGS has more words for the compiler, such as switches of the manual's chapter 2: -DTKV_CORE. It replaces
// Go's own -O2, so the package asks for -O2 itself.
package tieredkv

// #cgo CFLAGS: -O2 -I${SRCDIR}/../..
// #cgo !windows LDFLAGS: -lm
// #include "tieredkv.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"unsafe"
)

// AllLayers is a layer for Len: the length of the shortest one. Unlimited is a number of tokens for Fork: all.
const (
	AllLayers = C.TKV_ALL_LAYERS
	Unlimited = C.TKV_UNLIMITED
)

// Cache is a cache of one model. Attend may run on several goroutines while no other method runs.
type Cache struct {
	kv     *C.tkv_cache
	shapes []shape
}

type shape struct{ q, k, v, out int } // floats of a token

// Memory has bytes, and tokens of the tiers hot, warm and archive, summed over layers.
type Memory struct {
	Total, Peak, FP16 uint64
	Tokens            [3]uint64
	Ratio             float64
}

// New makes an empty cache. The config is a text, such as "model.n_layers = 4\nmodel.n_heads = 8\nmodel.head_dim = 64"
// (chapter 6 of the manual).
func New(config string) (*Cache, error) {
	var kv *C.tkv_cache
	var reason [400]C.char
	text := []byte(config + "\n")
	if C.tkv_create_ex(nil, (*C.char)(unsafe.Pointer(&text[0])), C.size_t(len(text)), &kv, &reason[0], 400) != C.TKV_OK {
		return nil, errors.New("tieredkv: " + C.GoString(&reason[0]))
	}
	c := &Cache{kv: kv}
	runtime.SetFinalizer(c, (*Cache).Close)
	var cfg C.tkv_config
	var info C.tkv_layer_info
	C.tkv_get_config(kv, &cfg)
	for layer := C.int(0); layer < cfg.model.n_layers; layer++ {
		s := shape{}
		if C.tkv_get_layer(kv, 0, layer, &info) == C.TKV_OK {
			heads, kvHeads, dim, vDim := int(info.n_heads), int(info.n_kv_heads), int(info.head_dim), int(info.v_head_dim)
			s = shape{heads * dim, kvHeads * dim, kvHeads * vDim, heads * vDim}
			if info.v_in_k != 0 {
				s.v = 0
			}
		}
		c.shapes = append(c.shapes, s)
	}
	return c, nil
}

// Close frees the cache. Later calls return an error.
func (c *Cache) Close() {
	C.tkv_destroy(c.kv)
	c.kv = nil
}

// check returns the error of a call that only reads.
func (c *Cache) check(status C.tkv_status) error {
	runtime.KeepAlive(c)
	if status == C.TKV_OK {
		return nil
	}
	return errors.New("tieredkv: " + C.GoString(C.tkv_get_status_text(status)))
}

// checkChange returns the error of a call that changes the cache. Such calls leave a sentence.
func (c *Cache) checkChange(status C.tkv_status) error {
	defer runtime.KeepAlive(c)
	err := c.check(status)
	if text := C.GoString(C.tkv_get_last_error(c.kv)); err != nil && text != "" {
		err = errors.New("tieredkv: " + text)
	}
	return err
}

// count returns the tokens of an array with `size` floats for each, and whether another array has as many.
func (c *Cache) count(layer int, a []float32, size func(shape) int, b []float32, other func(shape) int) (C.int, error) {
	if layer < 0 || layer >= len(c.shapes) || size(c.shapes[layer]) == 0 {
		return 0, fmt.Errorf("tieredkv: layer %d is out of range, or has no cache", layer)
	}
	each, also := size(c.shapes[layer]), other(c.shapes[layer])
	n := len(a) / each
	if n == 0 || len(a) != n*each || len(b) != n*also {
		return 0, fmt.Errorf("tieredkv: %d and %d floats, and a token of layer %d takes %d and %d", len(a), len(b), layer, each, also)
	}
	return number(n), nil
}

// number converts to an int of C. What does not fit becomes the nearest one: no sequence, layer or length is as large.
func number(x int) C.int {
	if x > math.MaxInt32 {
		return math.MaxInt32
	} else if x < math.MinInt32 {
		return math.MinInt32
	}
	return C.int(x)
}

func floats(x []float32) *C.float {
	if len(x) == 0 {
		return nil
	}
	return (*C.float)(unsafe.Pointer(&x[0]))
}

// Append adds tokens to a layer: k is [n][n_kv_heads][head_dim], after RoPE, v is [n][n_kv_heads][v_head_dim].
func (c *Cache) Append(seq, layer int, k, v []float32) error {
	n, err := c.count(layer, k, func(s shape) int { return s.k }, v, func(s shape) int { return s.v })
	if err != nil {
		return err
	}
	return c.checkChange(C.tkv_append(c.kv, number(seq), number(layer), floats(k), floats(v), n))
}

// Attend computes causal attention of the last n tokens: q is [n][n_heads][head_dim], out is [n][n_heads][v_head_dim].
func (c *Cache) Attend(seq, layer int, q, out []float32) error {
	n, err := c.count(layer, q, func(s shape) int { return s.q }, out, func(s shape) int { return s.out })
	if err != nil {
		return err
	}
	return c.check(C.tkv_attend(c.kv, number(seq), number(layer), floats(q), n, floats(out)))
}

// Len returns the tokens of a sequence in a layer, and 0 for a sequence or a layer that does not exist.
func (c *Cache) Len(seq, layer int) int {
	defer runtime.KeepAlive(c)
	return int(C.tkv_get_length(c.kv, number(seq), number(layer)))
}

// Fork makes dst a copy of the first n tokens of src. Both share the bytes. What dst held before is released.
func (c *Cache) Fork(src, dst, n int) error {
	return c.checkChange(C.tkv_seq_fork(c.kv, number(src), number(dst), number(n)))
}

// Truncate keeps the first n tokens of a sequence.
func (c *Cache) Truncate(seq, n int) error {
	return c.checkChange(C.tkv_seq_truncate(c.kv, number(seq), number(n)))
}

// Reset empties a sequence.
func (c *Cache) Reset(seq int) error { return c.checkChange(C.tkv_seq_reset(c.kv, number(seq))) }

// Memory reports what the cache holds, exact to the byte.
func (c *Cache) Memory() (Memory, error) {
	var m C.tkv_memory_info
	err := c.check(C.tkv_get_memory(c.kv, &m))
	out := Memory{Total: uint64(m.total), Peak: uint64(m.peak), FP16: uint64(m.fp16_bytes), Ratio: float64(m.ratio)}
	for i := range out.Tokens {
		out.Tokens[i] = uint64(m.tier[i].tokens)
	}
	return out, err
}
