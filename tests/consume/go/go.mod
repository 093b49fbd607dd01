module consume

go 1.19

require tieredkv v0.0.0

replace tieredkv => ../../..
