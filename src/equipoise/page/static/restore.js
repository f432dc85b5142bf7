// Restore: a visitor hides pixels of an image, adds noise or blur, and watches joint steps undo it, beside Adam.

import { $, Panel } from "./panel.js";
import { Curve } from "./curve.js";
import { Player } from "./player.js";
import { blank, bytes, image, paint, show } from "./pixels.js";

export class Restore extends Panel {
  constructor(name, view, { upload }) {
    super(name, view);
    if (this.empty) return;
    this.costs = new Curve($(this.root, ".costs"), { names: ["joint steps", "Adam"], x: "seconds" });
    this.kkt = new Curve($(this.root, ".kkt"), { names: ["z", "μ", "x"] });
    this.player = new Player($(this.root, ".player"), (at) => this.frame(at));
    this.lanes = [[], []];
    this.brush();
    this.uploads(upload, (picture) => this.take(picture));
    this.button("solve", () => this.solve());
    this.button("unhide", () => this.hide(() => false));
    this.button("middle", () => {
      const { width, height } = this.picture ?? { width: 0, height: 0 };
      const inner = (at, length) => at >= 0.3 * length && at < 0.7 * length;
      this.hide((x, y) => inner(x + 0.5, width) && inner(y + 0.5, height));
    });
  }

  choose() {
    this.bounds("steps", { max: this.model.steps, value: 60 });
    this.picture = null;
    this.examples({ seed: 0 }, (picture) => this.take(picture));
  }

  about({ sampled }, pictures) {
    const none = pictures.length ? "Examples from the test data" : "No examples: upload an image";
    $(this.root, ".examples-title").textContent = sampled ? "Examples, made by the generator itself" : none;
  }

  take(picture) {
    this.picture = picture;
    this.levels = bytes(picture.data);
    this.hole = new Uint8Array(picture.width * picture.height);
    this.work.stop();
    this.begin();
    this.say("");
    show($(this.root, ".truth"), picture);
    this.draw();
  }

  begin() {
    this.lanes = [[], []];
    this.ends = [];
    this.player.reset();
    this.costs.reset();
    this.kkt.reset();
    const { width, height } = this.picture;
    for (const name of [".given", ".image0", ".image1"]) blank($(this.root, name), width, height);
    for (const name of [".psnr-given", ".psnr0", ".psnr1"]) $(this.root, name).textContent = "";
  }

  /** Paint with a pointer into the hole. */
  brush() {
    const canvas = $(this.root, ".brush");
    let last = null;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const { width, height } = this.picture;
      return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
    };
    const stroke = (event) => {
      const to = at(event);
      const radius = this.number("width") / 2;
      const { width, height } = this.picture;
      const length = Math.hypot(to[0] - last[0], to[1] - last[1]);
      for (let part = 0; part <= 1; part += Math.min(1, 0.4 / (length + 1e-9))) {
        const [cx, cy] = [0, 1].map((axis) => last[axis] + part * (to[axis] - last[axis]));
        for (let y = Math.max(0, Math.floor(cy - radius)); y < Math.min(height, cy + radius); y++)
          for (let x = Math.max(0, Math.floor(cx - radius)); x < Math.min(width, cx + radius); x++)
            if (Math.hypot(x + 0.5 - cx, y + 0.5 - cy) <= Math.max(radius, 0.71)) this.hole[y * width + x] = 255;
      }
      last = to;
      this.draw();
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.picture) return;
      canvas.setPointerCapture(event.pointerId);
      last = at(event);
      stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => last && stroke(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (last = null));
  }

  hide(inside) {
    if (!this.picture) return;
    const { width } = this.picture;
    this.hole = this.hole.map((_, i) => (inside(i % width, Math.floor(i / width)) ? 255 : 0));
    this.draw();
  }

  draw() {
    const { width, height, channels } = this.picture;
    paint($(this.root, ".brush"), width, height, (i) => {
      if (this.hole[i]) return (i + Math.floor(i / width)) % 2 ? [214, 96, 40] : [160, 60, 20];
      return [0, 1, 2].map((c) => this.levels[channels * i + (channels === 3 ? c : 0)]);
    });
  }

  async solve() {
    if (!this.picture) {
      this.refuse("Choose an example or upload an image first.", "image");
      return;
    }
    this.begin();
    const { width, height } = this.picture;
    const numbers = Object.fromEntries(["noise", "blur", "steps"].map((name) => [name, this.number(name)]));
    this.say("Restoring …");
    const whole = await this.run("solve", { image: this.picture, hole: image(width, height, 1, this.hole), ...numbers, seed: 0 }, {
      given: ({ picture, psnr }) => {
        show($(this.root, ".given"), picture);
        $(this.root, ".psnr-given").textContent = decibels(psnr);
      },
      frame: (frame) => {
        this.lanes[frame.lane].push(frame);
        this.costs.add(frame.lane, frame.seconds, frame.cost);
        if (frame.lane) {
          if (frame.picture) show($(this.root, ".image1"), frame.picture);
          return;
        }
        ["z", "mu", "x"].forEach((name, k) => this.kkt.add(k, frame.step, frame.kkt[name]));
        this.player.add();
      },
      end: (end) => {
        this.ends[end.lane] = end;
        if (end.lane === 0) this.player.end();
        this.say(end.lane ? "Done: both had the same time." : "Adam has its turn …");
        this.frame(this.player.at);
      },
    });
    if (whole === false) this.player.end();
  }

  /** Show a joint step, and what Adam had at that time. */
  frame(at) {
    const [joint, adam] = this.lanes;
    const now = joint[at];
    if (!now) return;
    const last = at === joint.length - 1;
    this.kkt.mark(now.step);
    this.costs.mark(now.seconds);
    const then = adam.findLast((frame) => frame.seconds <= now.seconds) ?? adam[0];
    [now, then].forEach((frame, lane) => {
      const end = last && this.ends[lane];
      const picture = end ? end.picture : frame?.picture;
      if (picture) show($(this.root, `.image${lane}`), picture);
      $(this.root, `.psnr${lane}`).textContent = end ? decibels(end.psnr) : "";
    });
  }
}

function decibels(psnr) {
  return psnr === null ? "" : `(${psnr.toFixed(1)} dB)`;
}
