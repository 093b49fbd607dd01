// Opens a page in headless Chromium, in light and dark, wide and as narrow as a phone, and says what is wrong with it:
//
//     node .ci/report_page.mjs FILE.html FOLDER
//
// It checks that the page loads nothing else and does not scroll sideways. Texts must contrast with what is behind them
// (4.5, WCAG 2.2, 1.4.3), not overlap in a picture, and not be cut. FOLDER gets the screenshots. PLAYWRIGHT is the
// folder of the npm package playwright-core, and CHROMIUM the program.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { findFaults } from './page_faults.mjs'

const { chromium } = createRequire(process.cwd() + '/')(process.env.PLAYWRIGHT)
const [file, folder] = process.argv.slice(2)
const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ['--no-sandbox'],
})
const TEXTS = 'h1, h2, h3, p, a, li, th, td, caption, figcaption, code, svg text'
let faults = 0, checks = 0

function check(is_right, what) {
    checks++
    if (!is_right) faults++, console.log('not right: ' + what)
}

// Runs in the page. Returns sentences about faults of the pictures, and their number.
function inspectPictures() {
    const faults = []
    const shown = (e) => e.getClientRects().length > 0
    for (const svg of document.querySelectorAll('svg[role=img]')) {
        if (!shown(svg)) continue
        const outer = svg.getBoundingClientRect()
        const texts = [...svg.querySelectorAll('text')].map((e) => [e.textContent, e.getBoundingClientRect()])
        if (texts.length < 5) faults.push('a picture with few texts')
        texts.forEach(([text, box], i) => {
            const sideways = Math.min(box.left - outer.left, outer.right - box.right)
            if (Math.min(sideways, box.top - outer.top, outer.bottom - box.bottom) < -0.5)
                faults.push(`"${text}" is cut`)
            if (box.height < 9) faults.push(`"${text}" is ${box.height.toFixed(1)} pixels high`)
            for (const [other, b] of texts.slice(i + 1)) {
                const width = Math.min(box.right, b.right) - Math.max(box.left, b.left)
                const height = Math.min(box.bottom, b.bottom) - Math.max(box.top, b.top)
                if (width > 1 && height > 3) faults.push(`"${text}" and "${other}" overlap`)
            }
        })
    }
    return { faults, n: [...document.querySelectorAll('svg[role=img]')].filter(shown).length }
}

for (const colorScheme of ['light', 'dark'])
    for (const width of [1100, 600, 390, 320]) {
        const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme })
        const loaded = []
        page.on('request', (request) => loaded.push(request.url()))
        page.on('console', (message) => check(false, message.text()))
        await page.goto(pathToFileURL(file).href)
        const texts = await page.evaluate(findFaults, TEXTS), pictures = await page.evaluate(inspectPictures)
        const where = `${colorScheme}, ${width} pixels: `
        for (const fault of texts.faults.concat(pictures.faults)) check(false, where + fault)
        check(texts.n > 60 && pictures.n >= 3, `${where}${texts.n} texts, ${pictures.n} pictures`)
        check(loaded.length === 1, `${where}it loads ${loaded.slice(1).join(', ')}`)
        const dark = await page.evaluate(() => getComputedStyle(document.body).backgroundColor)
        check((dark === 'rgb(255, 255, 255)') === (colorScheme === 'light'), `${where}the page is ${dark}`)
        await page.screenshot({ path: `${folder}/${colorScheme}-${width}.png`, fullPage: true })
        await page.close()
    }
await browser.close()
console.log(`${checks - faults} passed, ${faults} failed`)
process.exit(faults ? 1 : 0)
