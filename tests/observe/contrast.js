// The texts whose contrast with what lies behind them is below WCAG 2's 4.5, with that contrast.
(() => {
  const parse = text => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => { for (let at = node; at; at = at.parentElement) {
    const style = getComputedStyle(at);
    const rgb = parse(at instanceof SVGElement ? "" : style.backgroundColor);
    if (rgb.length === 3 || (rgb.length === 4 && rgb[3] > 0)) return rgb; }
    return parse(getComputedStyle(document.body).backgroundColor); };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE", "title"].includes(node.tagName) || !node.checkVisibility()) continue;
    const style = getComputedStyle(node), a = light(parse(node instanceof SVGElement ? style.fill : style.color)), b = light(behind(node));
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) faint.push(`${walker.currentNode.data}: ${contrast.toFixed(2)}`);
  }
  return faint;
})()
