// Draw: a digit is classified step by step, by one solver or two; its class is certified, and attacked.

import { $, Panel, ending, fill, percent } from "./panel.js";
import { Curve, element } from "./curve.js";
import { Player } from "./player.js";
import { DIGITS, Sketch } from "./sketch.js";
import { Work } from "./server.js";
import { blank, diverging, image, show, showMaps } from "./pixels.js";

const SIDE = 28;

/** Two digits of a radius, rounded down: nothing is proven of a larger one. */
export function floor(radius) {
  if (!(radius > 0)) return "0";
  const unit = 10 ** (Math.floor(Math.log10(radius)) - 1);
  return (Math.floor(radius / unit) * unit).toPrecision(2);
}

export class Draw extends Panel {
  constructor(name, view) {
    super(name, view);
    if (this.empty) return;
    $(this.root, "details").open = matchMedia("(min-width: 820px)").matches;
    this.curve = new Curve($(this.root, ".residuals"), { names: ["residual"] });
    this.player = new Player($(this.root, ".player"), (at) => this.frame(at));
    this.sketch = new Sketch($(this.root, ".sketch"), () => this.solve());
    this.attacker = new Work({ busy: () => {}, say: () => {}, refuse: (...error) => this.refuse(...error) });
    DIGITS.forEach((strokes, digit) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
      button.setAttribute("aria-label", `Example: ${digit}`);
      button.addEventListener("click", () => this.sketch.set(strokes));
      $(this.root, ".examples").append(button);
    });
    this.button("clear", () => this.clear());
    this.button("attack", () => this.attack());
    for (const lane of [0, 1]) blank($(this.root, `.maps${lane}`), 2, 1);
    for (const name of ["step", "second_step", "tolerance", "steps"])
      this.control(name).addEventListener("change", () => this.solve());
    this.control("radius").addEventListener("change", () => this.attack());
    this.control("solver").addEventListener("change", () => this.stepsOf("solver", "step"));
    this.control("second").addEventListener("change", () => this.stepsOf("second", "second_step"));
  }

  words(name, value) {
    if (name === "tolerance") return `1e−${-value}`;
    if (name === "radius") return value.toFixed(2);
    return /step$/.test(name) && value === 0 ? "automatic" : String(value);
  }

  choose() {
    const { solvers, steps } = this.model;
    const pairs = solvers.map(({ name, label }) => [name, label]);
    fill(this.control("solver"), pairs);
    fill(this.control("second"), [["none", "None"], ...pairs]);
    this.bounds("steps", { max: steps, value: 100 });
    this.bars(this.model.classes);
    this.stepsOf("solver", "step", false);
    this.stepsOf("second", "second_step", false);
    $(this.root, ".attack").hidden = true;
    if (this.sketch.strokes.length) this.solve();
    else this.sketch.set(DIGITS[3]);
  }

  /** Show the step size of the chosen solver, if it has one. */
  stepsOf(solver, step, again = true) {
    const chosen = this.model.solvers.find(({ name }) => name === this.control(solver).value);
    const slider = this.control(step);
    slider.closest("label").hidden = !chosen?.step;
    if (chosen?.step) {
      const [meaning, min, max, value] = chosen.step;
      $(slider.closest("label"), ".name").textContent = meaning.replace(/^./, (letter) => letter.toUpperCase());
      this.bounds(step, { min, max, value });
    }
    if (again) this.solve();
  }

  bars(classes) {
    this.rows = classes.map((name) => {
      const bar = element("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
      const rects = [0, 1].map((lane) => element("rect", { class: `c${lane}`, x: 0, y: 0, width: 0, height: 10 }));
      bar.append(...rects);
      const [label, number] = ["span", "span"].map((tag) => document.createElement(tag));
      label.textContent = name;
      number.className = "number";
      return { label, bar, rects, number };
    });
    $(this.root, ".bars").replaceChildren(...this.rows.flatMap(({ label, bar, number }) => [label, bar, number]));
  }

  clear() {
    this.work.stop();
    this.attacker.stop();
    this.sketch.strokes = [];
    this.sketch.draw();
    this.begin();
    for (const name of [".seen", ".maps0", ".maps1"]) blank($(this.root, name));
    $(this.root, ".attack").hidden = true;
    this.say("");
  }

  begin() {
    this.lanes = [[], []];
    this.ends = [];
    this.player.reset();
    const labels = ["solver", "second"].map((name) => this.control(name).selectedOptions[0].label);
    this.two = this.control("second").value !== "none";
    this.curve.reset(this.two ? labels : labels.slice(0, 1));
    labels.forEach((label, lane) => ($(this.root, `.lane${lane}`).textContent = label));
    $(this.root, "figure.second").hidden = !this.two;
    $(this.root, ".of-first").textContent = this.two ? ` (numbers: ${labels[0]})` : "";
    this.rows.forEach(({ rects, number, label }) => {
      rects.forEach((rect) => rect.setAttribute("width", 0));
      number.textContent = label.className = "";
    });
  }

  stepSize(name) {
    const slider = this.control(name);
    return slider.closest("label").hidden ? 0 : Number(slider.value);
  }

  fields() {
    return { image: image(SIDE, SIDE, 1, this.pixels) };
  }

  async solve() {
    this.pixels = this.sketch.pixels();
    if (!this.pixels) return;
    this.attacker.stop();
    this.begin();
    show($(this.root, ".seen"), image(SIDE, SIDE, 1, this.pixels));
    const words = Object.fromEntries(["solver", "second"].map((name) => [name, this.control(name).value]));
    const fields = {
      ...this.fields(), ...words, step: this.stepSize("step"), second_step: this.stepSize("second_step"),
      tolerance: 10 ** this.number("tolerance"), steps: this.number("steps"),
    };
    this.say("Solving …");
    const whole = await this.run("solve", fields, {
      frame: (frame) => {
        const lane = this.lanes[frame.lane];
        lane.push(frame);
        this.curve.add(frame.lane, frame.step, frame.residual);
        if (lane.length > this.player.count) this.player.add();
      },
      end: (end) => (this.ends[end.lane] = end),
      certificate: (found) => this.certificate(found),
    });
    if (whole === null) return;
    if (!whole) {
      this.player.end();
      return;
    }
    this.frame(this.player.at); // of both solvers: the second one may have ended with fewer steps
    this.player.end();
    const [first, second] = this.ends;
    this.say(second ? `${this.curve.names[0]}: ${ending(first)} ${this.curve.names[1]}: ${ending(second)}` : ending(first));
  }

  frame(at) {
    this.curve.mark(at + 1);
    this.lanes.forEach((frames, lane) => {
      const frame = frames[Math.min(at, frames.length - 1)];
      if (!frame) return;
      const best = Math.max(...frame.probabilities);
      frame.probabilities.forEach((p, k) => {
        const { rects, number, label } = this.rows[k];
        rects[lane].setAttribute("width", 100 * p);
        if (this.two) {
          rects[lane].setAttribute("height", 5);
          rects[lane].setAttribute("y", 5 * lane);
        } else {
          rects[lane].setAttribute("height", 10);
        }
        if (lane) return;
        number.textContent = percent(p);
        label.className = p === best ? "best" : "";
      });
      if (!frame.maps) return;
      const scale = frames.findLast((each) => each.scale)?.scale ?? 1;
      showMaps($(this.root, `.maps${lane}`), frame.maps, (level) => diverging(((level - 127) / 127) * (frame.scale / scale)));
    });
  }

  certificate({ radius, class: label }) {
    const name = this.model.classes[label];
    this.safe = radius ?? 0;
    $(this.root, ".attack").hidden = false;
    $(this.root, ".certified").textContent = radius
      ? `Proven: no change of the image whose 2-norm is below ${floor(radius)} changes its class, ${name}. (Pixels range from 0 to 1.)`
      : "Nothing is proven for this image.";
    $(this.root, ".verdict").textContent = "";
    for (const name of [".attacked", ".change"]) blank($(this.root, name));
    this.path = [];
    this.disc();
  }

  async attack() {
    if (!this.pixels || $(this.root, ".attack").hidden) return;
    this.path = [];
    const radius = this.number("radius");
    this.forgive();
    const body = JSON.stringify({ model: this.control("model").value, ...this.fields(), radius });
    await this.attacker.run("/draw/attack", body, {
      moved: (place) => {
        this.path.push(place);
        this.disc();
      },
      attacked: ({ before, after, distance, probabilities, picture, change, x, y }) => {
        this.path.push({ x, y, class: after });
        show($(this.root, ".attacked"), picture);
        show($(this.root, ".change"), change);
        const [from, to] = [before, after].map((label) => this.model.classes[label]);
        const p = percent(probabilities[after]);
        $(this.root, ".verdict").textContent = before === after
          ? `A change of length ${distance.toFixed(2)} was tried: the class stays ${from} (${p}).`
          : `A change of length ${distance.toFixed(2)} turns ${from} into ${to} (${p}).`;
        this.disc(before);
      },
    });
  }

  /** The certified disc, the circle that the attack stays in, and the attack's way. */
  disc(label = this.path[0]?.class) {
    const radius = this.number("radius");
    const unit = 95 / Math.max(radius, this.safe, 1e-9);
    const parts = [
      element("circle", { class: "safe", r: this.safe * unit }),
      element("circle", { class: "reach", r: radius * unit }),
    ];
    const places = this.path.map(({ x, y, ...rest }) => ({ x: x * unit, y: -y * unit, ...rest }));
    if (places.length) {
      const d = places.map(({ x, y }, k) => `${k ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");
      parts.push(element("path", { class: "line c0", d }));
    }
    for (const { x, y, class: at } of places)
      parts.push(element("circle", { class: `dot ${at === label ? "c0" : "c1"}`, r: 2.6, cx: x, cy: y }));
    parts.push(element("circle", { class: "center", r: 3 }));
    const svg = $(this.root, ".disc");
    svg.setAttribute("viewBox", "-100 -100 200 200");
    svg.replaceChildren(...parts);
    svg.setAttribute("aria-label", `Certified radius ${floor(this.safe)}, largest change of the attack ${radius}.`);
  }
}
