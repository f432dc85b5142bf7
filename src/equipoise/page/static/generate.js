// Generate: samples settle, and an image follows a walk between two of them.

import { $, Panel, ending, fill } from "./panel.js";
import { Curve } from "./curve.js";
import { Player } from "./player.js";
import { Work } from "./server.js";
import { show } from "./pixels.js";

export class Generate extends Panel {
  constructor(name, view) {
    super(name, view);
    if (this.empty) return;
    this.curve = new Curve($(this.root, ".residuals"), { names: ["residual"] });
    this.player = new Player($(this.root, ".player"), (at) => this.frame(at));
    this.walker = new Work({ busy: () => {}, say: () => {}, refuse: (...error) => this.refuse(...error) });
    this.next = "first"; // which end of the walk the next click on a sample chooses
    this.button("sample", () => {
      this.control("seed").value = (this.number("seed") + 1) % 2 ** 31;
      this.sample();
    });
    this.control("seed").addEventListener("change", () => this.sample());
    for (const name of ["share", "entry", "move"]) this.control(name).addEventListener("input", () => this.walk());
    for (const name of ["first", "second"])
      this.control(name).addEventListener("change", () => {
        this.badges();
        this.walk();
      });
  }

  choose() {
    const { samples, entries, reach } = this.model;
    const numbers = Array.from({ length: samples }, (_, k) => [k, k + 1]);
    fill(this.control("first"), numbers);
    fill(this.control("second"), numbers);
    this.control("second").value = 1;
    this.bounds("entry", { max: entries, value: 1 });
    this.bounds("move", { min: -reach, max: reach, value: 0 });
    this.canvases = numbers.map(([k, label]) => {
      const picture = { width: 1, height: 1, channels: 1, data: "AA==" };
      const button = this.thumb(picture, `Sample ${label}`, () => {
        this.control(this.next).value = k;
        this.next = this.next === "first" ? "second" : "first";
        this.badges();
        this.walk();
      });
      button.append(document.createElement("b"));
      return button;
    });
    $(this.root, ".grid").replaceChildren(...this.canvases);
    this.badges();
    this.sample();
  }

  badges() {
    this.canvases.forEach((button, k) => {
      const ends = ["first", "second"].filter((name) => this.number(name) === k);
      button.setAttribute("aria-pressed", ends.length > 0);
      const badge = ends.map((name) => (name === "first" ? "from" : "to")).join(", ");
      $(button, "b").textContent = badge;
      button.setAttribute("aria-label", `Sample ${k + 1}${badge && `, ${badge}`}`);
    });
  }

  async sample() {
    this.frames = [];
    this.player.reset();
    this.curve.reset();
    this.walker.stop();
    this.say("Sampling …");
    const whole = await this.run("sample", { seed: this.number("seed") }, {
      frame: (frame) => {
        this.frames.push(frame);
        this.curve.add(0, frame.step, frame.residual);
        this.player.add();
      },
      end: (end) => {
        this.frames.push({ ...this.frames.pop(), pictures: end.pictures });
        this.frame(this.player.at);
        this.say(ending(end));
      },
    });
    if (whole !== null) this.player.end();
    if (whole) this.walk();
  }

  frame(at) {
    if (at < 0) return;
    const { step, pictures } = this.frames[at];
    this.curve.mark(step);
    pictures?.forEach((picture, k) => show($(this.canvases[k], "canvas"), picture));
  }

  walk() {
    const fields = Object.fromEntries(["seed", "first", "second", "share", "entry", "move"].map((name) => [name, this.number(name)]));
    this.forgive();
    this.walker.run("/generate/image", JSON.stringify({ model: this.control("model").value, ...fields }), {
      end: ({ pictures: [picture] }) => show($(this.root, ".between"), picture),
    });
  }
}
