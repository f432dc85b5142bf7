// A drawing area: strokes of a pointer, and the image that a model of digits takes.

const INK = 0.085; // width of a stroke, relative to the area
const SIDE = 28;
const BOX = 20; // the digit's longer side, in pixels, as in MNIST

/** Strokes of the example digits, as x, y in percent of the area. */
export const DIGITS = [
  [[50, 15, 35, 22, 27, 40, 26, 58, 33, 78, 48, 86, 63, 80, 72, 62, 73, 42, 66, 22, 50, 15]],
  [[38, 30, 52, 16, 52, 50, 51, 85]],
  [[28, 32, 36, 19, 52, 15, 66, 24, 67, 40, 55, 58, 38, 73, 27, 84, 48, 81, 74, 84]],
  [[30, 22, 46, 14, 63, 19, 67, 32, 58, 44, 45, 48, 60, 51, 70, 63, 66, 77, 50, 86, 31, 80]],
  [[58, 15, 45, 35, 28, 60, 52, 60, 76, 59], [61, 40, 60, 62, 58, 86]],
  [[68, 16, 50, 16, 36, 18, 33, 44, 48, 42, 64, 49, 69, 64, 61, 80, 45, 86, 29, 80]],
  [[62, 15, 46, 27, 34, 47, 31, 66, 39, 82, 54, 86, 66, 76, 66, 62, 54, 54, 40, 60, 32, 70]],
  [[27, 20, 48, 19, 72, 18, 62, 40, 52, 62, 44, 86]],
  [[63, 25, 50, 15, 36, 24, 39, 38, 52, 48, 65, 60, 66, 75, 51, 86, 36, 78, 35, 63, 50, 49, 62, 37, 63, 25]],
  [[65, 32, 54, 18, 40, 22, 35, 36, 43, 48, 57, 46, 65, 32, 65, 52, 62, 70, 58, 86]],
];

export class Sketch {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.strokes = [];
    let stroke = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      if (this.example) this.strokes = [];
      this.example = false;
      stroke = [...place(event)];
      this.strokes.push(stroke);
      this.draw();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!stroke) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) stroke.push(...place(each));
      this.draw();
    });
    for (const end of ["pointerup", "pointercancel"])
      canvas.addEventListener(end, () => {
        if (stroke) this.changed();
        stroke = null;
      });
    this.draw();
  }

  set(strokes) {
    this.strokes = strokes.map((stroke) => stroke.map((percent) => percent / 100));
    this.example = true; // the next stroke begins a drawing of the visitor's own
    this.draw();
    this.changed();
  }

  draw() {
    const { width, height } = this.canvas;
    render(this.canvas.getContext("2d"), this.strokes, width, height, (x, y) => [x * width, y * height], INK * width);
  }

  /** The digit scaled into a box and centred by its mass, as MNIST's were; null without strokes. */
  pixels() {
    if (!this.strokes.length) return null;
    const [xs, ys] = [0, 1].map((axis) => this.strokes.flatMap((stroke) => stroke.filter((_, i) => i % 2 === axis)));
    const half = INK / 2;
    const [left, right, top, bottom] = [Math.min(...xs) - half, Math.max(...xs) + half, Math.min(...ys) - half, Math.max(...ys) + half];
    const scale = BOX / Math.max(right - left, bottom - top, 0.3); // a dot stays small
    const fitted = (dx, dy) => {
      const canvas = new OffscreenCanvas(SIDE, SIDE);
      const context = canvas.getContext("2d", { willReadFrequently: true });
      const to = (x, y) => [SIDE / 2 + scale * (x - (left + right) / 2) + dx, SIDE / 2 + scale * (y - (top + bottom) / 2) + dy];
      render(context, this.strokes, SIDE, SIDE, to, Math.max(1.8, Math.min(INK * scale, 2.6)));
      return context.getImageData(0, 0, SIDE, SIDE).data.filter((_, i) => i % 4 === 0);
    };
    const levels = fitted(0, 0);
    let [mass, x, y] = [0, 0, 0];
    levels.forEach((level, i) => {
      mass += level;
      x += level * ((i % SIDE) + 0.5);
      y += level * (Math.floor(i / SIDE) + 0.5);
    });
    return mass ? fitted(Math.round(SIDE / 2 - x / mass), Math.round(SIDE / 2 - y / mass)) : levels;
  }
}

function render(context, strokes, width, height, to, ink) {
  context.fillStyle = "#000";
  context.fillRect(0, 0, width, height);
  Object.assign(context, { strokeStyle: "#fff", lineWidth: ink, lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    const points = [];
    for (let i = 0; i < stroke.length; i += 2) points.push(to(stroke[i], stroke[i + 1]));
    context.beginPath();
    context.moveTo(...points[0]);
    // Through the midpoints, so that corners of the pointer's path are round.
    for (let i = 1; i + 1 < points.length; i++) {
      const [a, b] = [points[i], points[i + 1]];
      context.quadraticCurveTo(...a, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
    }
    context.lineTo(...points.at(-1));
    context.stroke();
  }
}
