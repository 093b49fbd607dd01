// Runs a WASI program: node tests/wasm_run.mjs program.wasm [argument ...]
// It sees the current directory, ../shared/data, $TKV_DATA, and environment variables that begin with TKV_.
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { argv, env, exit } from 'node:process';
import { setFlagsFromString } from 'node:v8';
import { WASI } from 'node:wasi';

// V8 drops the bytecode of functions that have not been called for some collections. Node 20 drops it also while such a
// function waits for a long call of a program, and crashes when the call returns.
setFlagsFromString('--no-flush-bytecode');

const preopens = {};
for (const directory of ['.', '../shared/data', env.TKV_DATA]) {
    if (directory && existsSync(directory)) preopens[directory] = directory;
}
const wasi = new WASI({
    version: 'preview1',
    args: argv.slice(2),
    env: Object.fromEntries(Object.entries(env).filter(([name]) => name.startsWith('TKV_'))),
    preopens,
    returnOnExit: true,
});
const program = await WebAssembly.compile(await readFile(argv[2]));
exit(wasi.start(await WebAssembly.instantiate(program, { wasi_snapshot_preview1: wasi.wasiImport })));
