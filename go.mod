// The module begins here, since it must have the header. The package is in packaging/go.
module tieredkv

go 1.19
