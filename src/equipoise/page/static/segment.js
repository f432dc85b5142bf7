// Segment: the classes of a street scene's pixels settle; the image shows through them.

import { $, Panel, ending, percent } from "./panel.js";
import { Curve, element } from "./curve.js";
import { Player } from "./player.js";
import { bytes, paint, show } from "./pixels.js";

export class Segment extends Panel {
  constructor(name, view, { upload }) {
    super(name, view);
    if (this.empty) return;
    this.curve = new Curve($(this.root, ".residuals"), { names: ["scale 1"] });
    this.player = new Player($(this.root, ".player"), (at) => this.frame(at));
    this.uploads(upload, (picture) => this.take(picture));
    this.button("solve", () => this.solve());
    this.control("opacity").addEventListener("input", () => this.frame(this.player.at));
  }

  words(name, value) {
    return name === "opacity" ? percent(value) : String(value);
  }

  choose() {
    const { steps, default_steps: usual, scales } = this.model;
    this.bounds("steps", { max: steps, value: usual });
    this.curve.reset(Array.from({ length: scales }, (_, k) => `scale ${k + 1}`));
    this.examples({}, (picture) => this.take(picture));
  }

  take(picture) {
    this.picture = picture;
    this.levels = bytes(picture.data);
    show($(this.root, ".overlay"), picture);
    this.solve();
  }

  async solve() {
    if (!this.picture) {
      this.refuse("Choose an example or upload an image first.", "image");
      return;
    }
    this.frames = [];
    this.player.reset();
    this.curve.reset();
    this.legend({});
    this.say("Solving …");
    const whole = await this.run("solve", { image: this.picture, steps: this.number("steps") }, {
      frame: (frame) => {
        this.frames.push(frame);
        frame.scales.forEach((residual, k) => this.curve.add(k, frame.step, residual));
        this.player.add();
      },
      end: (end) => {
        this.frames.push({ ...this.frames.pop(), labels: end.labels });
        this.frame(this.player.at);
        this.legend(end.shares);
        this.say(ending(end));
      },
    });
    if (whole !== null) this.player.end();
  }

  legend(shares) {
    const { classes, colors } = this.model;
    const entries = Object.entries(shares).map(([name, share]) => {
      const row = document.createElement("li");
      const swatch = element("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" });
      swatch.append(element("rect", { width: 14, height: 14, rx: 3, fill: `rgb(${colors[classes.indexOf(name)]})` }));
      row.append(swatch, `${name} ${percent(share)}`);
      return row;
    });
    $(this.root, ".legend").replaceChildren(...entries);
  }

  frame(at) {
    const frame = this.frames?.[at];
    if (!frame) return;
    this.curve.mark(frame.step);
    if (!frame.labels) return;
    const { width, height, channels } = this.picture;
    const { colors } = this.model;
    const labels = bytes(frame.labels.data);
    const opacity = this.number("opacity");
    const [down, across] = [frame.labels.height / height, frame.labels.width / width];
    paint($(this.root, ".overlay"), width, height, (i) => {
      const label = labels[Math.floor(Math.floor(i / width) * down) * frame.labels.width + Math.floor((i % width) * across)];
      const color = colors[label] ?? [0, 0, 0];
      return [0, 1, 2].map((c) => opacity * color[c] + (1 - opacity) * this.levels[channels * i + (channels === 3 ? c : 0)]);
    });
  }
}
