package main

import (
	"fmt"

	tieredkv "tieredkv/packaging/go"
)

func main() {
	x, out := make([]float32, 2*64), make([]float32, 2*64) // q, k and v of a model with 2 heads of 64 channels
	x[0] = 1
	kv, err := tieredkv.New("model.n_layers = 1\nmodel.n_heads = 2\nmodel.head_dim = 64")
	for i := 0; i < 1000 && err == nil; i++ {
		if err = kv.Append(0, 0, x, x); err == nil {
			err = kv.Attend(0, 0, x, out)
		}
	}
	if err != nil {
		panic(err)
	}
	defer kv.Close()
	mem, _ := kv.Memory()
	fmt.Printf("%d hot, %d warm, %d archive, %d bytes, out %.1f\n", mem.Tokens[0], mem.Tokens[1], mem.Tokens[2], mem.Total, out[0])
}
