// page.js - the page around worker.js: buttons, cells, files.
'use strict'

const BUDGET = 1310720 // bytes of each memory
const PART = 1000 // letters of the chapter that "Talk on" reads at least: about 250 tokens
const MOST_FILE = 4 * BUDGET // bytes of a file, more than any talk has
const ENDING = 60 // tokens of an ending
const ANSWERS = 4 // rows of the table
const SPEECH = 250 // tokens that Romeo speaks when the chapter has ended
const OPENING = '\nSTRANGER:\nGod save you, sir. I have a thing to tell,\nAnd thou shalt keep it, till I ask again.\n'
const HOT = 0, WARM = 1, ARCHIVE = 2, GONE = 3 // of a cell
const SIDES = ['plain', 'tiered']
const at = (id) => document.getElementById(id)
const number = (x, digits = 0) =>
    x.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits })
const quiet = matchMedia('(prefers-reduced-motion: reduce)')

let secrets = [], levels = [], windowTokens = 0, shown = null, file = null, busy = true, nextDraw = 0
let endings = ['', '']

// >>worker
const waiting = new Map()
let worker, calls = 0

function call(name, ...args) {
    return new Promise((resolve, reject) => {
        waiting.set(++calls, { resolve, reject })
        worker.postMessage({ id: calls, name, args })
    })
}

function onMessage({ data }) {
    if (data.progress) {
        showProgress(data.progress)
        return
    }
    const { resolve, reject } = waiting.get(data.id)
    waiting.delete(data.id)
    if ('error' in data) reject(Error(data.error))
    else resolve(data.result)
}

// The bytes of a part of this page: base64 of gzip.
async function unpack(id) {
    const text = atob(at(id).textContent)
    at(id).remove()
    const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0))
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))
    return new Uint8Array(await new Response(stream).arrayBuffer())
}

// >>showing
const say = (text) => { at('status').textContent = text }

const talkText = () => at('talk').textContent

function setTalk(text) {
    at('talk').textContent = text
    at('talk').scrollTop = at('talk').scrollHeight
}

const addToTalk = (text) => setTalk(talkText() + text)

function showProgress({ state, text, ending }) {
    if (ending !== undefined) {
        endings[ending] += text
        at(ending ? 'ending-b' : 'ending-a').textContent = endings[ending].trimStart()
        return
    }
    if (text) addToTalk(text)
    if (!state) return
    shown = state
    const now = performance.now()
    if (!levels.length || now < nextDraw) return
    nextDraw = now + (quiet.matches ? 1000 : 30)
    draw()
}

function draw() {
    const { tokens, context, cells, bytes, divergence, rates, level, fingerprint } = shown
    SIDES.forEach((side, i) => {
        const counts = [0, 0, 0, 0]
        for (const cell of cells[i]) counts[cell]++
        const held = cells[i].length - counts[GONE]
        at(`held-${side}`).textContent = `${number(held)} of ${number(tokens)}`
        at(`bytes-${side}`).textContent = `${number(bytes[i])} (${number(100 * bytes[i] / BUDGET)} %)`
        at(`kl-${side}`).textContent = divergence.n ? number(divergence[side], 5) : '-'
        at(`rate-${side}`).textContent = rates[i] ? number(rates[i]) : '-'
        at(`cells-${side}`).setAttribute('aria-label', tokens === 0 ? 'No tokens yet.' :
            `${number(tokens)} tokens: ${counts[HOT]} in 16 bits, ${counts[WARM]} in 4 bits, ` +
            `${counts[ARCHIVE]} in ${bitsOf(Math.max(level, 2))} bits, ${counts[GONE]} gone.`)
        drawCells(at(`cells-${side}`), cells[i], context)
    })
    at('level').value = level
    at('level').setAttribute('aria-valuetext', `${bitsOf(level)} bits a value`)
    at('level-bits').textContent = `${bitsOf(level)} bits a value`
    at('archive-bits').textContent = bitsOf(Math.max(level, 2))
    at('kl-n').textContent = divergence.n || 64
    at('fingerprint').textContent = tokens ? fingerprint : '-'
}

const bitsOf = (level) => number(levels[level], level ? 2 : 0)

// One square for each token of the context, oldest first. Its size follows the bits, so colours are not needed to read
// it. All edges are on whole pixels.
function drawCells(canvas, cells, context) {
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name)
    const width = canvas.parentElement.clientWidth, size = width < 400 ? 7 : 8, columns = Math.floor((width - 1) / size)
    const rows = Math.ceil(context / columns), scale = Math.ceil(devicePixelRatio)
    canvas.width = (columns * size + 1) * scale
    canvas.height = (rows * size + 1) * scale
    canvas.style.width = `${columns * size + 1}px`
    const c = canvas.getContext('2d')
    c.scale(scale, scale)
    const square = (i, margin, fill) => {
        const x = i % columns * size + 1 + margin, y = Math.floor(i / columns) * size + 1 + margin
        c.fillStyle = fill
        c.fillRect(x, y, size - 1 - 2 * margin, size - 1 - 2 * margin)
    }
    const fills = ['--hot', '--warm', '--archive', '--gone'].map(colour)
    for (let i = 0; i < context; i++)
        if (i >= cells.length) square(i, (size >> 1) - 1, colour('--line'))
        else if (cells[i] < GONE) square(i, cells[i], fills[cells[i]])
        else {
            square(i, 1, fills[GONE])
            square(i, 2, colour('--paper'))
        }
    c.strokeStyle = colour('--accent')
    c.lineWidth = 1
    for (const { from, to } of secrets)
        for (let i = from; i < to; i++)
            c.strokeRect(i % columns * size + 0.5, Math.floor(i / columns) * size + 0.5, size, size)
}

function setSecrets(list) {
    const chosen = at('asked').value
    secrets = list
    at('asked').replaceChildren(...(list.length ? list : [{ name: '', number: '' }]).map(({ name }) => {
        const option = document.createElement('option')
        option.value = name
        option.textContent = name || 'nobody yet'
        return option
    }))
    if (list.some(({ name }) => name === chosen)) at('asked').value = chosen
}

// What an answer shows. A number that the model cannot tell with the exact cache either was not forgotten by a memory.
const verdictOf = (answer, hidden, exact) =>
    answer === hidden ? 'knows' : answer === exact ? 'says what the exact cache says' : 'forgot'

function addAnswer({ name, number: hidden }, [plain, tiered, exact]) {
    const row = document.createElement('tr'), tokens = shown.tokens
    const columns = [[name, hidden], [number(tokens), 'tokens'],
        ...[plain, tiered].map((x) => [x, verdictOf(x, hidden, exact)])]
    columns.forEach(([text, below], i) => {
        const cell = document.createElement(i ? 'td' : 'th'), note = document.createElement('span')
        if (!i) cell.scope = 'row'
        if (i > 1 && text === hidden) cell.className = 'knows'
        note.textContent = below
        cell.append(`${text} `, note)
        row.append(cell)
    })
    at('answers').append(row)
    if (at('answers').children.length > ANSWERS) at('answers').firstChild.remove()
    at('answers-box').hidden = false
}

// >>jobs
// Runs one job at a time. Buttons stay where the focus is, so they are not disabled, but do nothing meanwhile.
async function job(text, run) {
    if (busy) return
    setBusy(true)
    say(text)
    try {
        await run()
    } catch (error) {
        say(error.message)
    }
    setBusy(false)
    nextDraw = 0
    if (shown) draw()
}

function setBusy(is) {
    busy = is
    at('main').dataset.busy = is
    at('sides').setAttribute('aria-busy', is) // not main: its sentences are for now
    for (const button of document.querySelectorAll('button')) button.setAttribute('aria-disabled', is)
}

async function hear(text) {
    addToTalk(text)
    try {
        setSecrets((await call('hear', text)).secrets)
    } catch (error) {
        setTalk(talkText().slice(0, -text.length))
        throw error
    }
}

function refuseEndings() {
    if (!at('endings').hidden) throw Error('The talk has two endings. Go on with one of them first, or drop both.')
}

// What a job of the talk needs first: an ending is chosen, and there is an opening.
async function goOn() {
    refuseEndings()
    if (!talkText()) await hear(OPENING)
}

async function hide() {
    const name = at('name').value, digits = at('number').value
    await goOn()
    await hear(`The secret number of ${name} is ${digits}.\n`)
    at('asked').value = name
    say(`Both memories have heard the secret number of ${name}: ${digits}. Talk past the budget, and ask.`)
    at('number').value = String(10000 + Math.floor(Math.random() * 90000))
}

const chapter = []

function nextPart() {
    return chapter.find((part) => !talkText().includes(part))
}

function sayWhatIsLost() {
    const { tokens, cells } = shown
    const lost = secrets.filter(({ from, to }) => cells[0].slice(from, to).every((cell) => cell === GONE))
    say(`${number(tokens)} tokens were heard. The window holds ${number(Math.min(tokens, windowTokens))}, tieredkv all. ` +
        (lost.length ? `The window has lost the secret of ${lost.map(({ name }) => name).join(', ')}. Ask both.` :
            secrets.length ? 'The window holds the secret still.' : 'No secret is hidden yet.'))
}

async function talkOn() {
    const part = nextPart()
    await goOn()
    if (part) await hear(part)
    else setSecrets((await call('speak', SPEECH, false)).secrets)
    sayWhatIsLost()
}

async function talkPast() {
    const end = Math.max(...secrets.map(({ to }) => to), 0)
    do await talkOn()
    while (shown.tokens < end + windowTokens + 100 && shown.tokens < shown.context - 300)
}

async function sayLine() {
    const line = at('line').value.replace(/[^\x20-\x7e]/g, '').trim()
    if (!line) throw Error('There is nothing to say.')
    await goOn()
    await hear(`\nSTRANGER:\n${line}\n\nROMEO:\n`)
    const { speech, secrets: told } = await call('speak', 0, true)
    setSecrets(told)
    say(`Romeo says: ${speech.trim()}`)
}

async function ask() {
    const secret = secrets.find(({ name }) => name === at('asked').value)
    if (!secret) throw Error('There is no secret yet. Hide one first.')
    const answers = await call('ask', `\nThe secret number of ${secret.name} is`, 5)
    addAnswer(secret, answers)
    const [plain, tiered] = answers.map((x) => `says ${x}: it ${verdictOf(x, secret.number, answers[2])}`)
    say(`The number of ${secret.name} is ${secret.number}. The FP16 window ${plain}. tieredkv ${tiered}.`)
}

async function save() {
    refuseEndings()
    if (!talkText()) throw Error('There is nothing to save yet. Hide a secret, or talk.')
    file = await call('save')
    const link = document.createElement('a')
    link.href = URL.createObjectURL(new Blob([file]))
    link.download = 'talk.tkv'
    link.click()
    setTimeout(() => URL.revokeObjectURL(link.href), 10000)
    say(`The file talk.tkv has ${number(file.length)} bytes. Reload this page, and drop it in.`)
}

async function load(bytes) {
    let loaded
    try {
        loaded = await call('load', bytes)
    } catch (error) {
        throw Error(`Refused: ${error.message}. The talk goes on as it was.`)
    }
    file = bytes
    setTalk(loaded.text)
    setSecrets(loaded.secrets)
    showEndings(false)
    say(`${number(loaded.tokens)} tokens were loaded in ${number(loaded.ms, 1)} ms, fingerprint ` +
        `${loaded.fingerprint}. The window had to read the talk again: ${number(loaded.readingMs)} ms.`)
}

async function loadDamaged() {
    if (!file) throw Error('Save the talk first, or load a file.')
    const damaged = file.slice()
    damaged[Math.floor(Math.random() * damaged.length)] ^= 1 << Math.floor(Math.random() * 8)
    await load(damaged)
}

function showEndings(are) {
    for (const id of ['endings', 'keep-a', 'keep-b', 'keep-none']) at(id).hidden = !are
    at('fork').hidden = are
}

async function fork() {
    if (!talkText()) throw Error('There is no talk to fork yet. Hide a secret, or talk.')
    for (const id of ['ending-a', 'ending-b', 'bytes-a', 'bytes-b']) at(id).textContent = ''
    endings = ['', '']
    showEndings(true)
    at('keep-a').focus()
    try {
        const seeds = [0, 1].map(() => Math.floor(Math.random() * 2 ** 31))
        const { bytes } = await call('fork', '\nROMEO:\n', seeds, ENDING)
        bytes.forEach(([own, common], i) => {
            at(i ? 'bytes-b' : 'bytes-a').textContent =
                `${number(own)} bytes of its own, ${number(common)} shared with the past.`
        })
    } catch (error) {
        showEndings(false)
        at('fork').focus()
        throw error
    }
    say('Two endings were spoken. Both share the past of the talk. Go on with one of them.')
}

async function keep(ending) {
    const { secrets: told } = await call('keep', ending)
    if (ending !== null) addToTalk(endings[ending])
    setSecrets(told)
    showEndings(false)
    at('fork').focus()
    say(ending === null ? 'Both endings were dropped.' : `The talk goes on with ending ${'AB'[ending]}.`)
}

async function setLevel() {
    const level = Number(at('level').value)
    await call('level', level)
    say(`From now on old tokens take ${bitsOf(level)} bits a value at most. tieredkv holds ` +
        `${number(shown.bytes[1])} bytes.`)
}

async function begin() {
    await call('reset', Math.floor(Math.random() * 2 ** 31))
    setTalk('')
    at('answers').replaceChildren()
    at('answers-box').hidden = true
    showEndings(false)
    setSecrets([])
    say('A new talk begins. Hide a secret.')
}

// >>start
function onClick(id, text, run) {
    at(id).addEventListener('click', () => job(text, run))
}

function onSubmit(id, text, run) {
    at(id).addEventListener('submit', (event) => {
        event.preventDefault()
        job(text, run)
    })
}

async function loadFile(chosen) {
    if (busy) say('The page is at work. Load the file again when it has finished.')
    else if (chosen)
        await job('The file is being loaded.', async () => {
            if (chosen.size > MOST_FILE)
                throw Error(`Refused: no talk has ${number(chosen.size)} bytes. The talk goes on as it was.`)
            await load(new Uint8Array(await chosen.arrayBuffer()))
        })
}

function listen() {
    onSubmit('hide', 'The secret is being told.', hide)
    onClick('past', 'Romeo is read to.', talkPast)
    onClick('on', 'The talk goes on.', talkOn)
    onSubmit('say', 'Romeo thinks.', sayLine)
    onSubmit('ask', 'Both are asked.', ask)
    onClick('save', 'The talk is being saved.', save)
    onClick('damage', 'A file with one flipped bit is being loaded.', loadDamaged)
    onClick('fork', 'Two endings are being spoken.', fork)
    onClick('keep-a', 'Ending A is being kept.', () => keep(0))
    onClick('keep-b', 'Ending B is being kept.', () => keep(1))
    onClick('keep-none', 'Both endings are being dropped.', () => keep(null))
    onClick('new', 'A new talk begins.', begin)
    at('level').addEventListener('change', () => job('Old tokens are being coded.', setLevel))
    at('file').addEventListener('change', async () => {
        await loadFile(at('file').files[0])
        at('file').value = ''
    })
    for (const name of ['dragenter', 'dragover'])
        addEventListener(name, (event) => {
            event.preventDefault()
            document.body.classList.add('dropping')
        })
    addEventListener('dragleave', () => document.body.classList.remove('dropping'))
    addEventListener('drop', (event) => {
        event.preventDefault()
        document.body.classList.remove('dropping')
        loadFile(event.dataTransfer.files[0])
    })
    const drawAgain = () => { if (levels.length) draw() }
    addEventListener('resize', drawAgain)
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAgain)
}

function splitChapter(text) {
    let part = '\n'
    for (const line of text.trim().split('\n')) {
        part += line + '\n'
        if (part.length < PART || line !== '') continue
        chapter.push(part)
        part = ''
    }
    if (part.trim()) chapter.push(part)
}

async function start() {
    setBusy(true)
    worker = new Worker(URL.createObjectURL(new Blob([at('worker').textContent])))
    worker.onmessage = onMessage
    worker.onerror = () => say('The model cannot run in this browser. It needs WebAssembly SIMD.')
    splitChapter(at('chapter').textContent)
    listen()
    const began = await call('start', await unpack('wasm'), await unpack('model'), BUDGET)
    levels = began.levels
    windowTokens = began.window
    at('level').max = levels.length - 1
    await begin()
    setBusy(false)
    draw()
}

at('number').value = String(10000 + Math.floor(Math.random() * 90000))
start().catch((error) => say(`The model cannot run in this browser: ${error.message}`))
