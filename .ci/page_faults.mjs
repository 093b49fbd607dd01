// What tests of pages in a browser share. AXE is the file axe.min.js of the npm package axe-core.

// Returns sentences about faults of accessibility that axe-core finds, and the number of its rules that are met.
export async function findAxeFaults(page) {
    await page.addScriptTag({ path: process.env.AXE })
    const { violations, passes } = await page.evaluate(() => window.axe.run())
    return { faults: violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`), n: passes.length }
}

// It runs in the page, so it uses nothing from outside.
// Returns sentences about faults of the texts that a selector finds, and their number: too little contrast with what is
// behind them (4.5, WCAG 2.2, 1.4.3), and a page that scrolls sideways.
export function findFaults(selector) {
    const faults = []
    const parse = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number)
    const light = (colour) => parse(colour).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
    const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor
            if (colour !== 'rgba(0, 0, 0, 0)' && colour !== 'transparent') return colour
        }
        return 'rgb(255, 255, 255)'
    }
    let n = 0
    for (const e of document.querySelectorAll(selector)) {
        if (e.getClientRects().length === 0) continue
        n++
        const style = getComputedStyle(e), colour = e.tagName === 'text' ? style.fill : style.color
        const ratio = contrast(light(colour), light(behind(e)))
        if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)} of "${e.textContent.slice(0, 40)}"`)
    }
    if (document.documentElement.scrollWidth > innerWidth)
        faults.push(`the page is ${document.documentElement.scrollWidth} pixels wide, the window ${innerWidth}`)
    return { faults, n }
}
