// Measures the model of examples/web by its own worker, in node (the engine of Chromium):
//
//     node bench/web_speed.mjs PAGE.html ...
//
// Pages take turns, and the first turn warms up. A talk reads 3,000 letters of the chapter, more than the window holds,
// and then speaks. The figures are medians of tokens for each second of CPU time, of the whole model.
import { readFileSync } from 'node:fs'
import vm from 'node:vm'
import { gunzipSync } from 'node:zlib'

const BUDGET = 1310720, LETTERS = 3000, SPEECH = 32, TURNS = 4

function partOf(page, id) {
    const start = page.indexOf('>', page.indexOf(`id="${id}"`)) + 1
    return page.slice(start, page.indexOf('</script>', start))
}

const bytesOf = (page, id) => gunzipSync(Buffer.from(partOf(page, id), 'base64'))

function cpuMilliseconds() {
    const { user, system } = process.cpuUsage()
    return (user + system) / 1000
}

// Starts the worker of a page. Returns a function that runs a job, and gives the rates of it.
async function startWorker(page) {
    const waiting = { done: null, rates: null }
    const context = vm.createContext({
        WebAssembly, TextDecoder, TextEncoder, Uint8Array, Error, performance: { now: cpuMilliseconds },
        postMessage: ({ progress, error }) => {
            if (progress?.state) waiting.rates = progress.state.rates
            else if (!progress) waiting.done(error)
        },
    })
    vm.runInContext(partOf(page, 'worker'), context)
    const run = async (name, ...args) => {
        const error = await new Promise((resolve) => {
            waiting.done = resolve
            context.onmessage({ data: { id: 0, name, args } })
        })
        if (error) throw Error(error)
        return waiting.rates
    }
    await run('start', bytesOf(page, 'wasm'), bytesOf(page, 'model'), BUDGET)
    return run
}

const files = process.argv.slice(2)
const pages = files.map((file) => readFileSync(file, 'utf8')), rates = files.map(() => [])
const runs = await Promise.all(pages.map(startWorker))
for (let turn = 0; turn < TURNS; turn++)
    for (const [i, run] of runs.entries()) {
        await run('reset', 1)
        const reading = await run('hear', partOf(pages[i], 'chapter').slice(0, LETTERS))
        const speaking = await run('speak', SPEECH, false)
        if (turn > 0) rates[i].push([...reading, ...speaking])
    }
const median = (list) => list.sort((a, b) => a - b)[list.length >> 1]
files.forEach((file, i) => {
    const [a, b, c, d] = [0, 1, 2, 3].map((k) => Math.round(median(rates[i].map((x) => x[k]))))
    console.log(`${file}: reading ${a} (window), ${b} (tieredkv); speaking ${c}, ${d}`)
})
