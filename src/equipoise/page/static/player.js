// The steps of a solve, played at a pace that can be watched, and a slider to go through them.

const PER_SECOND = 15;

export class Player {
  /** @param show called with the number of a frame, from 0 */
  constructor(root, show) {
    this.show = show;
    this.button = Object.assign(document.createElement("button"), { type: "button", textContent: "Play", disabled: true });
    this.slider = Object.assign(document.createElement("input"), { type: "range", min: 1, max: 1, value: 1, disabled: true });
    this.slider.setAttribute("aria-label", "Step");
    this.output = document.createElement("output");
    root.append(this.button, this.slider, this.output);
    this.button.addEventListener("click", () => this.toggle());
    this.slider.addEventListener("input", () => {
      this.play(false);
      this.go(Number(this.slider.value) - 1);
    });
    this.reset();
  }

  reset() {
    clearTimeout(this.timer);
    this.timer = null;
    this.count = 0;
    this.at = -1;
    this.ended = false;
    this.playing = true;
    this.button.disabled = this.slider.disabled = true;
    this.button.textContent = "Play";
    this.output.textContent = "";
  }

  /** One more frame has arrived. */
  add() {
    this.count += 1;
    this.slider.max = this.count;
    this.button.disabled = this.slider.disabled = false;
    if (this.at < 0) {
      this.go(0);
      this.play(true);
    } else {
      this.label();
      this.wake();
    }
  }

  /** No frame will follow. */
  end() {
    this.ended = true;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches && this.playing) this.go(this.count - 1);
    if (this.at === this.count - 1) this.play(false);
  }

  wake() {
    if (!this.playing || this.timer !== null) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (!this.playing) return;
      if (this.at < this.count - 1) this.go(this.at + 1);
      if (this.at < this.count - 1) this.wake();
      else if (this.ended) this.play(false);
    }, 1000 / PER_SECOND);
  }

  go(at) {
    this.at = Math.max(0, Math.min(at, this.count - 1));
    this.slider.value = this.at + 1;
    this.label();
    if (this.count) this.show(this.at);
  }

  label() {
    this.output.textContent = `${this.at + 1} of ${this.count}`;
    this.slider.setAttribute("aria-valuetext", `step ${this.at + 1} of ${this.count}`);
  }

  play(on) {
    this.playing = on;
    this.button.textContent = on ? "Pause" : "Play";
    if (on) this.wake();
  }

  toggle() {
    if (!this.playing && this.at === this.count - 1) this.go(0);
    this.play(!this.playing);
  }
}
