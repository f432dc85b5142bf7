// Look inside: the objective of a MOptEq falls, with and without diversity between its channels.

import { $, Panel, ending, fill, percent } from "./panel.js";
import { Curve } from "./curve.js";
import { Player } from "./player.js";
import { rising, show, showMaps } from "./pixels.js";

const LANES = ["with diversity", "without"];

export class Inside extends Panel {
  constructor(name, view, { upload }) {
    super(name, view);
    if (this.empty) return;
    this.curve = new Curve($(this.root, ".objectives"), { names: LANES });
    this.player = new Player($(this.root, ".player"), (at) => this.frame(at));
    this.laneRoots = [...this.root.querySelectorAll(".lane")];
    this.uploads(upload, (picture) => this.take(picture));
    this.button("solve", () => this.solve());
    this.control("solver").addEventListener("change", () => this.solve());
    this.lanes = [[], []];
    this.control("off").addEventListener("change", () => {
      const both = this.control("off").checked;
      this.laneRoots[1].hidden = !both;
      this.curve.reset(both ? LANES : LANES.slice(0, 1));
      this.heights();
      if (this.player.at >= 0) this.frame(this.player.at);
    });
  }

  choose() {
    const { solvers, steps, branches } = this.model;
    fill(this.control("solver"), solvers.map(({ name, label }) => [name, label]));
    this.bounds("steps", { max: steps, value: 60 });
    for (const root of this.laneRoots) {
      const made = (what, label) => Array.from({ length: branches }, (_, k) => {
        const canvas = Object.assign(document.createElement("canvas"), { className: "pixels", width: 1, height: 1 });
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", label(k));
        return canvas;
      });
      $(root, ".heat").replaceChildren(...made("heat", (k) => `Similarity of the channels of branches ${((k + 1) % branches) + 1} and ${k + 1}`));
      $(root, ".branches").replaceChildren(...made("branches", (k) => `Mean magnitude of branch ${k + 1}`));
    }
    this.examples({}, (picture) => this.take(picture));
  }

  about({ known }) {
    $(this.root, ".examples-title").textContent = known ? "Examples from the test data" : "Examples, drawn by this page";
  }

  take(picture) {
    this.picture = picture;
    this.solve();
  }

  async solve() {
    if (!this.picture) {
      this.refuse("Choose an example or upload an image first.", "image");
      return;
    }
    this.lanes = [[], []];
    this.player.reset();
    this.curve.reset();
    for (const root of this.laneRoots) $(root, ".note").textContent = "";
    this.say("Solving …");
    const fields = { image: this.picture, solver: this.control("solver").value, steps: this.number("steps") };
    const whole = await this.run("solve", fields, {
      frame: (frame) => {
        const lane = this.lanes[frame.lane];
        lane.push(frame);
        this.heights();
        if (lane.length > this.player.count) this.player.add();
      },
      end: (end) => this.end(end),
    });
    if (whole === null) return;
    if (this.player.at >= 0) this.frame(this.player.at); // of both lanes: the second one came later
    this.player.end();
    if (whole) this.say("Done.");
  }

  /** The objective of each lane above its lowest value so far. */
  heights() {
    this.lanes.slice(0, this.curve.names.length).forEach((frames, lane) => {
      const lowest = Math.min(...frames.map(({ objective }) => objective));
      this.curve.points[lane] = frames.map(({ step, objective }) => [step, objective - lowest]);
    });
    this.curve.later();
  }

  end({ lane, probabilities, similarity, diversity, ...rest }) {
    const best = probabilities.indexOf(Math.max(...probabilities));
    const lowest = Math.min(...this.lanes[lane].map(({ objective }) => objective));
    $(this.laneRoots[lane], ".note").textContent =
      `${ending(rest)} Objective ${lowest.toPrecision(6)}; λ = ${diversity}; mean similarity of different channels ` +
      `${similarity.toFixed(3)}; class ${this.model.classes[best]} (${percent(probabilities[best])}).`;
  }

  frame(at) {
    this.curve.mark(at + 1);
    this.lanes.forEach((frames, lane) => {
      const frame = frames[Math.min(at, frames.length - 1)];
      if (!frame?.heat) return;
      [...$(this.laneRoots[lane], ".heat").children].forEach((canvas, k) => {
        if (k < frame.heat.count) showMaps(canvas, part(frame.heat, k), (level) => rising(level / 255), 1);
      });
      [...$(this.laneRoots[lane], ".branches").children].forEach((canvas, k) => show(canvas, frame.branches[k]));
    });
  }
}

/** One of several maps. */
function part({ height, width, data }, k) {
  const all = atob(data);
  return { count: 1, height, width, data: btoa(all.slice(k * height * width, (k + 1) * height * width)) };
}
