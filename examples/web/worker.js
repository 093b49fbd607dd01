// worker.js - runs the model and its three caches (remembers.c, compiled to WASM) beside the page.
//
// The page posts { id, name, args }, and gets { id, result } or { id, error }. Between them come { progress }: the state
// of the talk, and text that was just spoken. page.js has the other end.
'use strict'

const PLAIN = 0, TIERED = 1, EXACT = 2, SIDES = [PLAIN, TIERED, EXACT]
const TALK = 0, ENDING_A = 1, ENDING_B = 2
const CHUNK = 32 // tokens that a side reads at a time, as in remembers.c
const ROOM = 40 // tokens of the context that stay free for questions
const REPLY = 48, TEMPERATURE = 0.7
let web // the exports of remembers.c
let spent = [], last = [0, 0, 0] // milliseconds and tokens of this job by side; tokens a second of the last one
let divergence = { plain: 0, tiered: 0, n: 0 }

// >>memory
const bytesAt = (at, n) => new Uint8Array(web.memory.buffer, at, n)

function textAt(at) {
    const bytes = new Uint8Array(web.memory.buffer, at)
    return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)))
}

// Calls `use` with the place of n bytes in the memory of the program.
function withRoom(n, use) {
    const at = web.web_alloc(n)
    if (!at) throw Error('The browser has no memory for this.')
    try {
        return use(at)
    } finally {
        web.web_free(at)
    }
}

// Calls `use` with a copy of the bytes there, and their number.
const withBytes = (bytes, use) => withRoom(bytes.length, (at) => {
    bytesAt(at, bytes.length).set(bytes)
    return use(at, bytes.length)
})

const withText = (text, use) => withBytes(new TextEncoder().encode(text), use)

// A result below 0 is a failure, and web_text() its reason.
function checked(result) {
    if (result < 0) throw Error(textAt(web.web_text()))
    return result
}

// >>state
// The text of each token, from `first` on. A character of several tokens is with its last one.
function pieces(seq, first) {
    const decoder = new TextDecoder(), texts = []
    for (let i = first; i < web.web_length(seq); i++) {
        const n = web.web_piece(seq, i)
        texts.push(decoder.decode(bytesAt(web.web_text(), n), { stream: true }))
    }
    return texts
}

// The secret numbers of the talk: name, number, and the tokens that tell them.
function secrets() {
    const found = new Map(), ends = []
    let text = ''
    for (const piece of pieces(TALK, 0)) ends.push((text += piece).length)
    for (const match of text.matchAll(/The secret number of ([A-Za-z ]+) is (\d{5})\./g)) {
        const end = match.index + match[0].length
        found.set(match[1], {
            name: match[1], number: match[2],
            from: ends.findIndex((x) => x > match.index), to: ends.findIndex((x) => x >= end) + 1,
        })
    }
    return [...found.values()]
}

function state() {
    const cells = [PLAIN, TIERED].map((side) =>
        withRoom(web.web_context(), (at) => bytesAt(at, web.web_cells(side, at)).slice()))
    return {
        tokens: web.web_length(TALK), context: web.web_context(), cells, level: web.web_level(),
        bytes: [web.web_bytes(PLAIN), web.web_bytes(TIERED)], divergence, rates: last.slice(0, 2),
        fingerprint: textAt(web.web_fingerprint(TALK)),
    }
}

function begin() {
    spent = SIDES.map(() => ({ ms: 0, tokens: 0 }))
}

function report(text) { // speeds are of jobs in which all sides read the same tokens
    if (spent.every((x) => x.ms > 0 && x.tokens === spent[EXACT].tokens))
        last = spent.map((x) => 1000 * x.tokens / x.ms)
    postMessage({ progress: { state: state(), text } })
}

// >>reading
function read(side, seq) {
    const start = performance.now()
    const n = checked(web.web_read(side, seq, CHUNK))
    spent[side].ms += performance.now() - start
    spent[side].tokens += n
    return n
}

// Every side reads the tokens that it has not read, in chunks. Divergences are means of 64 tokens or more, at the
// beginning of fewer.
function readAll(tell) {
    while (SIDES.map((side) => read(side, TALK)).some((n) => n > 0)) {
        web.web_compare()
        const n = web.web_compared(), isWhole = n >= 2 * CHUNK
        if (isWhole || divergence.n < 2 * CHUNK)
            divergence = { plain: web.web_divergence(PLAIN), tiered: web.web_divergence(TIERED), n }
        if (isWhole) web.web_forget_divergence()
        if (tell) report()
    }
}

const roomLeft = (seq) => web.web_context() - ROOM - web.web_length(seq)
const fullText = () =>
    `The model reads ${web.web_context().toLocaleString('en')} tokens at most. Begin a new talk, or load one.`

// A speech of at most n tokens. It ends with an empty line, or with a line behind the middle, if `stops`.
function speak(seq, n, stops, tell) {
    const first = web.web_length(seq), decoder = new TextDecoder()
    let speech = ''
    for (let i = 0; i < n && roomLeft(seq) > 0; i++) {
        checked(web.web_speak(seq, TEMPERATURE))
        const piece = decoder.decode(bytesAt(web.web_text(), web.web_piece(seq, first + i)), { stream: true })
        speech += piece
        if (seq === TALK) readAll(false)
        else read(TIERED, seq)
        tell(piece, i)
        if (stops && speech.endsWith('\n') && (i > n / 2 || (speech.trim() && speech.endsWith('\n\n')))) break
    }
    return speech
}

// >>jobs
const jobs = {
    async start(wasm, model, budget) {
        const stub = new Proxy({}, { get: () => () => 52 }) // no files and no clock: ENOSYS
        const { instance } = await WebAssembly.instantiate(wasm, { wasi_snapshot_preview1: stub })
        web = instance.exports
        web._initialize()
        const at = web.web_alloc(model.length) // the model stays there
        if (!at) throw Error('The browser has no memory for the model.')
        bytesAt(at, model.length).set(model)
        const window = checked(web.web_start(at, model.length, budget))
        const levels = []
        for (let i = 0; web.web_level_bits(i) > 0; i++)
            levels.push(web.web_level_bits(i))
        return { window, levels }
    },
    hear(text) {
        if (new TextEncoder().encode(text).length > 4 * web.web_context()) throw Error('This text is too long.')
        const first = web.web_length(TALK)
        const n = withText(text, (at, size) => web.web_hear(TALK, at, size))
        if (n < 0 || roomLeft(TALK) < 0) {
            web.web_unhear(first)
            throw Error(fullText())
        }
        readAll(true)
        return { secrets: secrets() }
    },
    speak(n, stops) {
        if (roomLeft(TALK) <= 0)
            throw Error(fullText())
        let waiting = ''
        const speech = speak(TALK, stops ? REPLY : n, stops, (piece, i) => {
            waiting += piece
            if (i % 4 !== 3) return
            report(waiting)
            waiting = ''
        })
        report(waiting)
        return { speech, secrets: secrets() }
    },
    ask(question, digits) {
        return [PLAIN, TIERED, EXACT].map((side) => {
            withText(question, (at, size) => checked(web.web_ask(side, at, size, digits)))
            return textAt(web.web_text())
        })
    },
    fork(cue, seeds, n) {
        try {
            checked(web.web_fork())
            for (const ending of [0, 1]) {
                const seq = ENDING_A + ending, tell = (text) => postMessage({ progress: { ending, text } })
                web.web_seed(seq, seeds[ending])
                withText(cue, (at, size) => checked(web.web_hear(seq, at, size)))
                if (roomLeft(seq) <= 0) throw Error(fullText())
                read(TIERED, seq)
                tell(cue)
                speak(seq, n, false, tell)
            }
        } catch (error) {
            web.web_keep(TALK) // takes back what there is of the endings
            throw error
        }
        return {
            bytes: [ENDING_A, ENDING_B].map((seq) => [0, 1].map((shared) => web.web_ending_bytes(seq, shared))),
        }
    },
    keep(ending) { // 0 and 1; null: none
        checked(web.web_keep(ending === null ? TALK : ENDING_A + ending))
        readAll(true)
        return { secrets: secrets() }
    },
    save() {
        const at = web.web_save()
        if (!at) throw Error(textAt(web.web_text()))
        const bytes = bytesAt(at, web.web_saved_bytes()).slice()
        web.web_free(at)
        return bytes
    },
    load(bytes) {
        const start = performance.now()
        withBytes(bytes, (at, size) => checked(web.web_load(at, size)))
        const ms = performance.now() - start, fingerprint = textAt(web.web_fingerprint(TALK))
        const readingStart = performance.now()
        divergence = { plain: 0, tiered: 0, n: 0 }
        readAll(true)
        return {
            ms, readingMs: performance.now() - readingStart, fingerprint, secrets: secrets(),
            text: pieces(TALK, 0).join(''), tokens: web.web_length(TALK),
        }
    },
    reset(seed) {
        checked(web.web_reset())
        web.web_seed(TALK, seed)
        divergence = { plain: 0, tiered: 0, n: 0 }
        last = [0, 0, 0]
        return {}
    },
    level(level) {
        checked(web.web_set_level(level))
        return {}
    },
}

onmessage = async ({ data: { id, name, args } }) => {
    try {
        begin()
        const result = await jobs[name](...args)
        report()
        postMessage({ id, result })
    } catch (error) {
        postMessage({ id, error: error.message })
    }
}
