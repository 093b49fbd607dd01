// Uses the page of examples/web in headless Chromium as a visitor does, and says what is wrong with it:
//
//     node .ci/web_page.mjs FILE.html FOLDER
//
// A secret is hidden, the talk goes past the budget, and both memories are asked. The talk is saved, damaged, loaded
// after a reload, forked, and coded in fewer bits. All of it is done with a mouse, and the first part with a keyboard
// alone. FOLDER gets the screenshots. PLAYWRIGHT is the folder of the npm package playwright-core, AXE the file
// axe.min.js of axe-core, and CHROMIUM the program.
import { readFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { findAxeFaults, findFaults } from './page_faults.mjs'

const { chromium } = createRequire(process.cwd() + '/')(process.env.PLAYWRIGHT)
const [file, folder] = process.argv.slice(2)
const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ['--no-sandbox'],
})
const BUDGET = 1310720, WINDOW = 640
const TEXTS = 'h1, h2, h3, p, li, dt, dd, th, td, caption, label, button, code, #answers span, input, select'
let faults = 0, checks = 0

function check(isRight, what) {
    checks++
    if (!isRight) faults++, console.log('not right: ' + what)
}

const equal = (a, b, what) => check(a === b, `${what}: ${JSON.stringify(a)} and ${JSON.stringify(b)}`)

// >>the page
const text = (page, id) => page.locator(`#${id}`).textContent()
const figure = async (page, id) => Number((await text(page, id)).match(/[\d.,]+/)[0].replaceAll(',', ''))

// Waits until the page has done what it was told. Returns what a screen reader hears.
async function done(page) {
    await page.waitForFunction(() => document.getElementById('main').dataset.busy === 'false', null,
        { timeout: 120000 })
    return page.getByRole('status').textContent()
}

// Controls are found by role and name, as a screen reader finds them.
async function press(page, name) {
    await page.getByRole('button', { name, exact: true }).click()
    return done(page)
}

async function open(options) {
    const context = await browser.newContext(options)
    const page = await context.newPage(), loaded = []
    await page.addInitScript(() => { // the same numbers and speeches each time
        let x = 1
        Math.random = () => (x = x * 16807 % 2147483647) / 2147483647
    })
    page.on('request', (request) => loaded.push(request.url()))
    page.on('console', (message) => check(false, `console: ${message.text()}`))
    page.on('pageerror', (error) => check(false, `error: ${error.message}`))
    await page.goto(pathToFileURL(file).href)
    equal(await done(page), 'A new talk begins. Hide a secret.', 'the first sentence')
    page.setDefaultTimeout(120000)
    return { page, loaded }
}

async function screenshot(page, name, fullPage = true) {
    await page.evaluate(() => scrollTo(0, 0))
    await page.screenshot({ path: `${folder}/${name}.png`, fullPage })
}

// Drops bytes on the page, as a file, and once more at once if `again`. Returns what a screen reader hears of the last
// drop, and at the end.
async function dropTwice(page, bytes, again = true) {
    const first = await page.evaluate(([base64, times]) => {
        const dataTransfer = new DataTransfer()
        dataTransfer.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], 'talk.tkv'))
        for (let i = 0; i < times; i++)
            document.body.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }))
        return document.getElementById('status').textContent
    }, [Buffer.from(bytes).toString('base64'), again ? 2 : 1])
    return [first, await done(page)]
}

const drop = async (page, bytes) => (await dropTwice(page, bytes, false))[1]

// The newest answers: name, hidden number, and what both say.
async function answers(page) {
    await press(page, 'Ask both')
    const cells = await page.locator('#answers tr').last().locator('th, td').evaluateAll((all) =>
        all.map((cell) => [...cell.childNodes].map((node) => node.textContent.trim())))
    const [[name, hidden], [tokens], [plain], [tiered]] = cells
    return { name, hidden, tokens, plain, tiered }
}

// >>the story
async function hideAndAsk() {
    const { page, loaded } = await open({ viewport: { width: 1280, height: 900 } })
    check((await press(page, 'Ask both')).startsWith('There is no secret yet.'), 'asked before a secret is hidden')
    check((await press(page, 'Save the talk')).startsWith('There is nothing to save'), 'saved before a talk')
    await page.getByLabel('Whose number?').selectOption('Romeo')
    await page.getByLabel('Five digits').fill('40886')
    check((await press(page, 'Hide it')).startsWith('Both memories have heard the secret number of Romeo: 40886.'), 'a secret')
    const near = await answers(page)
    equal(near.plain + near.tiered, '4088640886', 'within the budget both know')
    equal(await figure(page, 'bytes-plain'), 2048 * await figure(page, 'held-plain'), 'bytes of the window')

    const past = await press(page, 'Talk past the budget')
    check(past.endsWith('The window holds 640, tieredkv all. The window has lost the secret of Romeo. Ask both.'), past)
    const far = await answers(page)
    equal([far.name, far.hidden, far.tokens].join(), `Romeo,40886,${past.split(' ')[0]}`, 'the row of the answers')
    equal(await page.locator('#answers tr').count(), 2, 'rows of answers')
    check(far.plain !== '40886', 'the window has forgotten')
    equal(far.tiered, '40886', 'the tiered memory knows')
    check(/The FP16 window says \d{5}: it forgot\. tieredkv says 40886: it knows\./.test(
        await page.getByRole('status').textContent()), 'the sentence about the answers')
    equal(await figure(page, 'held-plain'), WINDOW, 'tokens in the window')
    equal(await figure(page, 'bytes-plain'), BUDGET, 'the window has the whole budget')
    check(await figure(page, 'bytes-tiered') <= BUDGET, 'the tiered memory is within the budget')
    equal(new Set((await text(page, 'held-tiered')).split(' of ')).size, 1, 'the tiered memory has all tokens')
    check(await figure(page, 'kl-plain') > 20 * await figure(page, 'kl-tiered'), 'the divergence of the window')
    check(await figure(page, 'rate-plain') > 0 && await figure(page, 'rate-tiered') > 0, 'speeds')
    const label = await page.getByRole('img').last().getAttribute('aria-label')
    check(/^1,\d{3} tokens: \d+ in 16 bits, [1-9]\d* in 4 bits, \d+ in 3.06 bits, 0 gone\.$/.test(label), label)
    await screenshot(page, 'asked')
    equal(loaded.filter((url) => !url.startsWith('blob:') && !url.startsWith('data:')).length, 1, 'files loaded')
    return page
}

async function saveAndLoad(page) {
    check((await press(page, 'Say it')).startsWith('Romeo says: '), 'a reply')
    const download = page.waitForEvent('download')
    check(/^The file talk\.tkv has [\d,]+ bytes\./.test(await press(page, 'Save the talk')), 'a sentence about the file')
    const saved = await download
    equal(saved.suggestedFilename(), 'talk.tkv', 'name of the file')
    const bytes = await readFile(await saved.path())
    const fingerprint = await text(page, 'fingerprint'), before = await text(page, 'talk')
    check(/^[0-9a-f]{16}$/.test(fingerprint), fingerprint)

    for (let i = 0; i <= 16; i++) { // one byte is another one, from the first to the last
        const damaged = Buffer.from(bytes)
        damaged[Math.floor(i * (bytes.length - 1) / 16)] ^= 1 << i % 8
        const said = await drop(page, damaged)
        check(/^Refused: the file: [^.]+\. The talk goes on as it was\.$/.test(said), `byte ${i} of 16: ${said}`)
    }
    check((await drop(page, bytes.subarray(0, 5000))).startsWith('Refused: '), 'a cut file')
    check((await drop(page, Buffer.alloc(6e6))).startsWith('Refused: no talk has 6,000,000 bytes.'), 'a large file')
    check((await drop(page, Buffer.from('no talk'))).startsWith('Refused: '), 'another file')
    check((await press(page, 'Flip one byte of the file, and load it')).startsWith('Refused: '), 'the button that damages')
    equal(await text(page, 'fingerprint'), fingerprint, 'the talk after refused files')
    const says = [await press(page, 'Say it'), await text(page, 'fingerprint'), await press(page, 'Talk on'),
        await text(page, 'fingerprint'), await press(page, 'Say it'), await text(page, 'fingerprint')]
    const after = await text(page, 'talk')

    await page.reload()
    await done(page)
    equal(await text(page, 'talk'), '', 'the talk after a reload')
    const said = await drop(page, bytes)
    check(said.includes(`fingerprint ${fingerprint}.`), said)
    equal(await text(page, 'talk'), before, 'the loaded talk')
    const again = [await press(page, 'Say it'), await text(page, 'fingerprint'), await press(page, 'Talk on'),
        await text(page, 'fingerprint'), await press(page, 'Say it'), await text(page, 'fingerprint')]
    equal(again.join('\n'), says.join('\n'), 'what is said after a load')
    equal(await text(page, 'talk'), after, 'the talk that goes on')
    const known = await answers(page)
    check(known.hidden === '40886' && known.plain !== '40886' && known.tiered === '40886', 'asked after a load')
    const [meanwhile, end] = await dropTwice(page, bytes)
    equal(meanwhile, 'The page is at work. Load the file again when it has finished.', 'a file that is dropped meanwhile')
    check(end.includes(`fingerprint ${fingerprint}.`), end)
    await page.getByLabel('Load a file').setInputFiles({ name: 'x.tkv', mimeType: '', buffer: bytes })
    await page.waitForTimeout(50)
    check((await done(page)).includes(`fingerprint ${fingerprint}.`), 'a chosen file')
}

async function forkAndKeep(page) {
    const before = await text(page, 'talk')
    check((await press(page, 'Fork the talk')).startsWith('Two endings were spoken.'), 'two endings')
    const [a, b] = [await text(page, 'ending-a'), await text(page, 'ending-b')]
    check(a.length > 60 && b.length > 60 && a !== b, 'the endings differ')
    for (const id of ['bytes-a', 'bytes-b']) {
        const [own, common] = (await text(page, id)).match(/\d[\d,]*/g).map((x) => Number(x.replaceAll(',', '')))
        check(common > own && own > 0, `${own} bytes of its own, ${common} shared`)
    }
    equal(await page.evaluate(() => document.activeElement.id), 'keep-a', 'the focus is on the choice')
    check((await press(page, 'Talk on')).startsWith('The talk has two endings.'), 'a talk with two endings waits')
    check((await press(page, 'Save the talk')).startsWith('The talk has two endings.'), 'so does a file')
    await screenshot(page, 'endings')
    await press(page, 'Go on with B')
    const kept = await text(page, 'talk')
    check(kept.startsWith(before) && kept.endsWith(b) && !kept.includes(a), 'the talk has ending B')
    equal(await page.evaluate(() => document.activeElement.id), 'fork', 'the focus is where it was')
    await press(page, 'Fork the talk')
    await press(page, 'Drop both')
    equal(await text(page, 'talk'), kept, 'no ending is kept')
    equal((await answers(page)).tiered, '40886', 'the past is still known')
}

async function fewerBits(page) {
    const slider = page.getByRole('slider', { name: 'Bits of old tokens' })
    await slider.focus()
    let last = Infinity, n = 0
    for (let level = Number(await slider.inputValue()); level < 5; n++) { // a step may take the next one with it
        const before = level
        await page.keyboard.press('ArrowRight')
        await page.waitForTimeout(50)
        await done(page)
        const bytes = await figure(page, 'bytes-tiered')
        level = Number(await slider.inputValue())
        check(level > before, `level ${level} behind ${before}`)
        check(bytes < last, `${bytes} bytes at level ${level}, ${last} before`)
        last = bytes
        if (level <= before) break
    }
    check(n > 0, 'steps of the slider')
    equal(await slider.getAttribute('aria-valuetext'), '1.31 bits a value', 'the slider as it is read out')
    check(last < BUDGET * 0.6, `${last} bytes with the fewest bits`)
    await answers(page)
    await page.keyboard.press('Home')
    await press(page, 'Talk on')
    await screenshot(page, 'fewest-bits')
    equal(await press(page, 'Begin a new talk'), 'A new talk begins. Hide a secret.', 'a new talk')
    equal(await figure(page, 'held-tiered'), 0, 'tokens of a new talk')
}

async function longTalk(page) { // to the end of the model's context
    let said = ''
    for (let i = 0; i < 12 && !said.startsWith('The model reads'); i++) said = await press(page, 'Talk on')
    check(said.startsWith('The model reads 2,048 tokens at most.'), said)
    check(await figure(page, 'bytes-tiered') <= BUDGET, 'a full context is within the budget')
    await screenshot(page, 'full')
    said = ''
    for (let i = 0; i < 40 && !said.startsWith('The model reads'); i++) said = await press(page, 'Say it')
    for (let i = 0; i < 4; i++) { // a first ending may have room for some words
        said = await press(page, 'Fork the talk')
        if (!said.startsWith('Two endings')) break
        await press(page, 'Go on with A')
    }
    check(said.startsWith('The model reads 2,048 tokens at most.'), `endings of a full context: ${said}`)
    equal(await page.evaluate(() => document.activeElement.id), 'fork', 'the focus when there is no ending')
    equal(await page.getByRole('button', { name: 'Go on with A' }).count(), 0, 'endings when there is no ending')
}

// >>without a mouse
async function keyboard() {
    const { page } = await open({ viewport: { width: 1280, height: 900 }, reducedMotion: 'reduce' })
    const reach = async (id) => {
        for (let i = 0; i < 40; i++) {
            if (await page.evaluate(() => document.activeElement.id) === id) return
            await page.keyboard.press('Tab')
        }
        check(false, `Tab does not reach ${id}`)
    }
    await reach('number')
    await page.keyboard.press('Control+A')
    await page.keyboard.type('27182')
    await page.keyboard.press('Enter')
    check((await done(page)).includes('27182'), 'hidden with the keyboard')
    await reach('past')
    const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineWidth)
    equal(outline, '3px', 'the outline of the focus')
    await page.keyboard.press('Space')
    await page.waitForTimeout(50)
    await done(page)
    await reach('ask-button')
    await page.keyboard.press('Enter')
    await page.waitForTimeout(50)
    check(/window says \d{5}: it forgot.*tieredkv says 27182: it knows/.test(await done(page)), 'asked with the keyboard')
    const order = []
    await reach('name')
    for (let i = 0; i < 15; i++, await page.keyboard.press('Tab'))
        order.push(await page.evaluate(() => document.activeElement.id))
    equal(order.join(' '), 'name number hide-button past on line say-button asked ask-button level talk new save damage file',
        'the order of the focus')
    await reach('fork')
    await page.context().close()
}

// >>how it looks
async function looks() {
    for (const colorScheme of ['light', 'dark'])
        for (const width of [1280, 600, 360]) {
            const { page } = await open({ viewport: { width, height: 800 }, colorScheme })
            await press(page, 'Hide it')
            await press(page, 'Talk past the budget')
            await press(page, 'Ask both')
            await press(page, 'Fork the talk')
            const where = `${colorScheme}, ${width} pixels: `
            const { faults: found, n } = await page.evaluate(findFaults, TEXTS)
            for (const fault of found) check(false, where + fault)
            check(n > 60, `${where}${n} texts`)
            const axe = await findAxeFaults(page)
            for (const fault of axe.faults) check(false, where + fault)
            check(axe.n > 20, `${where}${axe.n} rules of axe-core`)
            const small = await page.evaluate(() => [...document.querySelectorAll('button, input, select')]
                .filter((e) => e.getClientRects().length && e.getBoundingClientRect().height < 43.5).map((e) => e.id))
            equal(small.join(' '), '', `${where}controls below 44 pixels`)
            await screenshot(page, `${colorScheme}-${width}`)
            await page.context().close()
        }
}

// The picture of the README. It ends where the section of the memories ends.
async function picture() {
    const { page } = await open({ viewport: { width: 1040, height: 1010 }, colorScheme: 'light' })
    await page.getByLabel('Five digits').fill('58213')
    await press(page, 'Hide it')
    await press(page, 'Ask both')
    await press(page, 'Talk past the budget')
    await press(page, 'Talk on')
    await press(page, 'Say it')
    for (let i = 0; i < 8 && await page.getByRole('slider').inputValue() < 2; i++) // until all tiers have tokens
        await press(page, 'Say it')
    const said = await answers(page)
    check(said.plain !== '58213' && said.tiered === '58213', 'the answers in the picture')
    const { y, height } = await page.locator('section', { has: page.locator('#sides') }).boundingBox()
    await page.setViewportSize({ width: 1040, height: Math.ceil(y + height) + 8 })
    await screenshot(page, 'picture', false)
    await page.context().close()
}

const page = await hideAndAsk()
await saveAndLoad(page)
await forkAndKeep(page)
await fewerBits(page)
await longTalk(page)
await keyboard()
await looks()
await picture()
await browser.close()
console.log(`${checks - faults} passed, ${faults} failed`)
process.exit(faults ? 1 : 0)
