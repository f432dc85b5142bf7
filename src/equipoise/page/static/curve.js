// Line charts as SVG: one line per series, logarithmic axes, a mark at the step that is shown.

const NS = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 14, top: 18, bottom: 34 };

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function powers(low, high) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 5));
  const ticks = [];
  for (let power = from; power <= to; power += every) ticks.push(10 ** power);
  return ticks;
}

function rounds(low, high, most = 6) {
  const raw = (high - low || 1) / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= raw);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step) ticks.push(at);
  return ticks;
}

function number(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-2 || size >= 1e4) ? value.toExponential(0).replace("e-", "e−") : String(+value.toFixed(3));
}

export class Curve {
  /** @param names names of the series; `x` names the horizontal axis */
  constructor(svg, { names, x = "step" }) {
    this.svg = svg;
    this.names = names;
    this.x = x;
    svg.setAttribute("role", "img");
    this.reset(names);
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  reset(names = this.names) {
    this.names = names;
    this.points = names.map(() => []);
    this.head = null;
    this.draw();
  }

  add(series, x, y) {
    if (y !== null) this.points[series].push([x, y]);
    this.later();
  }

  mark(x) {
    this.head = x;
    this.later();
  }

  /** Draw once per animation frame, however many points arrived. */
  later() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      this.draw();
    });
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const { left, right, top, bottom } = MARGIN;
    const drawn = this.points.map((points) => points.filter(([, y]) => y > 0));
    const all = drawn.flat();
    const [xs, ys] = [all.map(([x]) => x), all.map(([, y]) => y)];
    const xLow = xs.length ? Math.min(...xs) : 0;
    const steps = this.x === "step";
    const xHigh = xs.length ? Math.max(...xs, xLow + (steps ? 1 : 1e-3)) : 10;
    const ticks = powers(ys.length ? Math.min(...ys) : 1e-4, ys.length ? Math.max(...ys) : 1);
    const [low, high] = [ticks[0], Math.max(ticks.at(-1), ...(ys.length ? ys : [1]))].map(Math.log10);
    const across = (x) => left + ((x - xLow) / (xHigh - xLow)) * (width - left - right);
    const down = (y) => top + ((high - Math.log10(y)) / (high - low || 1)) * (height - top - bottom);
    const parts = [];
    for (const tick of ticks) {
      parts.push(element("line", { class: "axis", x1: left, x2: width - right, y1: down(tick), y2: down(tick) }));
      parts.push(element("text", { x: left - 6, y: down(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    for (const tick of rounds(xLow, xHigh).filter((tick) => !steps || Number.isInteger(+tick.toFixed(6))))
      parts.push(element("text", { x: across(tick), y: height - bottom + 16, "text-anchor": "middle" }, number(tick)));
    parts.push(element("text", { x: width - right, y: height - 3, "text-anchor": "end" }, this.x));
    if (this.head !== null && all.length && this.head >= xLow && this.head <= xHigh)
      parts.push(element("line", { class: "head", x1: across(this.head), x2: across(this.head), y1: top, y2: height - bottom }));
    const dotted = Math.max(0, ...drawn.map((points) => points.length)) <= 40;
    drawn.forEach((points, k) => {
      const path = points.map(([x, y], i) => `${i ? "L" : "M"}${across(x).toFixed(1)} ${down(y).toFixed(1)}`).join("");
      const group = element("g", { class: `c${k}` });
      group.append(element("path", { class: "line", d: path || "M0 0" }));
      for (const [x, y] of dotted ? points : points.slice(-1))
        group.append(element("circle", { class: "dot", r: 2.5, cx: across(x), cy: down(y) }));
      parts.push(group);
    });
    if (this.names.length > 1) {
      let at = left + 4;
      this.names.forEach((name, k) => {
        const group = element("g", { class: `c${k}` });
        group.append(element("text", { class: "name", x: at, y: 11 }, name));
        parts.push(group);
        at += 8.2 * name.length + 14;
      });
    }
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.summary());
  }

  summary() {
    const said = this.names.map((name, k) => {
      const last = this.points[k].at(-1);
      return last ? `${name} ${number(last[1])} at ${this.x} ${number(last[0])}` : `${name}: nothing yet`;
    });
    return `Curve. ${said.join("; ")}.`;
  }
}
