// What the views share: models to choose from, sliders that say their value, errors beside their control, uploads.

import { Work } from "./server.js";
import { show } from "./pixels.js";

export const $ = (root, selector) => root.querySelector(selector);

export class Panel {
  constructor(name, { missing, models }) {
    this.name = name;
    this.root = document.getElementById(`view-${name}`);
    this.models = models;
    if (!models.length) {
      this.explain(missing);
      return;
    }
    this.form = $(this.root, "form");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.work = new Work(this);
    this.statusLine = $(this.root, ".status");
    this.stopButton = this.button("stop", () => {
      this.work.stop();
      this.say("Stopped.");
    });
    const select = this.control("model");
    fill(select, models.map((model) => [model.name, model.name]));
    select.parentElement.hidden = models.length < 2;
    select.addEventListener("change", () => this.choose());
    for (const slider of this.root.querySelectorAll("label input[type=range]")) {
      slider.addEventListener("input", () => this.value(slider));
      this.value(slider);
    }
  }

  /** Replace the view by a sentence; what stands between backticks is a command. */
  explain(sentence) {
    const paragraph = document.createElement("p");
    sentence.split("`").forEach((part, k) => {
      paragraph.append(k % 2 ? Object.assign(document.createElement("code"), { textContent: part }) : part);
    });
    $(this.root, ".columns").replaceWith(paragraph);
  }

  get empty() {
    return !this.models.length;
  }

  get model() {
    return this.models.find((model) => model.name === this.control("model").value);
  }

  /** A model was chosen; views add what depends on it. */
  choose() {}

  /** The view is no longer visible: nobody watches its solve. */
  close() {
    if (this.empty || !this.work.current) return;
    this.work.stop();
    this.say("Stopped, since another view was opened.");
  }

  /** The view is visible again. */
  reopen() {
    if (this.unready) this.choose();
  }

  control(name) {
    return this.form.elements.namedItem(name) ?? $(this.root, `[name="${name}"]`);
  }

  number(name) {
    return Number(this.control(name).value);
  }

  button(name, action) {
    const button = this.control(name);
    button.addEventListener("click", action);
    return button;
  }

  /** Show the value of a slider beside it. */
  value(slider) {
    const output = $(slider.parentElement, "output");
    if (output) output.textContent = this.words(slider.name, Number(slider.value));
  }

  words(name, value) {
    return String(value);
  }

  bounds(name, { min, max, value }) {
    const slider = this.control(name);
    if (min !== undefined) slider.min = min;
    if (max !== undefined) slider.max = max;
    if (value !== undefined) slider.value = value;
    this.value(slider);
  }

  busy(on) {
    this.stopButton.disabled = !on;
    this.root.setAttribute("aria-busy", on);
  }

  say(text) {
    this.statusLine.textContent = text;
  }

  /** Start a job; its fields are those of the view, plus the model. */
  run(action, fields, on) {
    this.forgive();
    return this.work.run(`/${this.name}/${action}`, JSON.stringify({ model: this.control("model").value, ...fields }), on);
  }

  refuse(message, control = "") {
    this.say("");
    if (control === "image" && this.uploaded) control = "upload"; // where this image came from
    const place = control && $(this.root, `[data-control="${control}"]`);
    if (!place || place.closest("[hidden]")) {
      this.say(message);
      return;
    }
    const folded = place.closest("details");
    if (folded) folded.open = true;
    const id = `${this.name}-${control}-error`;
    const line = document.getElementById(id) ?? Object.assign(document.createElement("p"), { id, className: "error" });
    line.setAttribute("role", "alert");
    place.append(line);
    line.textContent = message;
    const input = $(place, "input, select");
    input?.setAttribute("aria-invalid", "true");
    input?.setAttribute("aria-describedby", id);
  }

  forgive() {
    for (const line of this.root.querySelectorAll(".error")) line.remove();
    for (const input of this.root.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  /** Fill the examples of the view, and choose the first. */
  async examples(fields, chosen) {
    const row = $(this.root, ".thumbs");
    this.unready = true; // until they arrive, which a visitor who opens another view does not await
    await this.run("examples", fields, {
      examples: ({ pictures, ...about }) => {
        this.unready = false;
        this.about?.(about, pictures);
        row.replaceChildren(...pictures.map((picture, k) => this.thumb(picture, `Example ${k + 1}`, () => {
          this.press(row, k);
          chosen(picture);
        })));
        if (pictures.length) row.firstElementChild.click();
      },
    });
  }

  thumb(picture, label, action) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "thumb" });
    button.setAttribute("aria-label", label);
    button.setAttribute("aria-pressed", "false");
    const canvas = Object.assign(document.createElement("canvas"), { className: "pixels" });
    show(canvas, picture);
    button.append(canvas);
    button.addEventListener("click", action);
    return button;
  }

  /** Say beside the upload how the image was changed. */
  note(text) {
    const line = $(this.root, ".upload-note");
    if (line) line.textContent = text;
  }

  press(row, chosen) {
    this.uploaded = chosen < 0;
    this.note("");
    [...row.children].forEach((button, k) => button.setAttribute("aria-pressed", k === chosen));
  }

  /** Send a chosen file to be decoded. */
  uploads(most, chosen) {
    const input = this.control("upload");
    input.addEventListener("click", () => (input.value = "")); // so that a corrected file of the same name is read
    input.addEventListener("change", async () => {
      const [file] = input.files;
      if (!file) return;
      this.forgive();
      if (file.size > most) {
        this.refuse(`The file is larger than the limit: ${(file.size / 1e6).toFixed(1)} MB of ${most / 1e6} MB. Make it smaller.`, "upload");
        return;
      }
      const query = new URLSearchParams({ model: this.control("model").value });
      await this.work.run(`/upload/${this.name}?${query}`, file, {
        picture: ({ picture, note }) => {
          this.press($(this.root, ".thumbs"), -1);
          chosen(picture);
          this.note(note);
        },
      });
    });
  }
}

export function fill(select, pairs) {
  select.replaceChildren(...pairs.map(([value, label]) => new Option(label, value)));
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
}

/** The sentence that ends a solve. */
export function ending({ converged, steps, message, seconds }) {
  const time = seconds < 1 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : `${seconds.toFixed(1)} s`;
  const after = `settled after ${steps} ${steps === 1 ? "step" : "steps"} (${time})`;
  return converged ? `S${after.slice(1)}.` : `Not ${after}: ${message}`;
}
