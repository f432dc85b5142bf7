// Requests to the server, and the events that it streams back.

export class Refusal extends Error {
  constructor(message, control = "") {
    super(message);
    this.control = control;
  }
}

const GONE = "The server does not answer: is `equipoise page` still running?";

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(GONE);
  }
  if (response.ok) return response;
  const text = await response.text();
  try {
    const { message, control } = JSON.parse(text);
    throw new Refusal(message, control);
  } catch (error) {
    if (error instanceof Refusal) throw error;
    throw new Refusal(text.trim() || `The server answered ${response.status}.`);
  }
}

export async function facts() {
  return (await answer("/facts")).json();
}

/** Yield [kind, data] for every event of a job. */
async function* events(path, body, signal) {
  const response = await answer(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(GONE);
    }
    if (part.done) return;
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = /^event: (\w+)\ndata: (.*)$/.exec(block);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}

/** One job at a time: a new one stops the one before. */
export class Work {
  constructor(panel) {
    this.panel = panel;
    this.current = null;
  }

  stop() {
    this.current?.abort();
    this.current = null;
    this.panel.busy(false);
  }

  /**
   * Run a job; `on` has a function for each kind of event. Resolves to whether it came to its end, or to null if
   * another job took its place, to which the player and the status line belong now.
   */
  async run(path, body, on) {
    this.current?.abort();
    const own = (this.current = new AbortController());
    this.panel.busy(true);
    let whole = true;
    try {
      for await (const [kind, data] of events(path, body, own.signal)) {
        if (this.current !== own) break;
        if (kind === "waiting") this.panel.say(data.ahead ? `Waiting: ${data.ahead} ahead of you …` : "Waiting …");
        else if (kind === "refused") {
          whole = false;
          this.panel.refuse(data.message, data.control);
        } else on[kind]?.(data);
      }
    } catch (error) {
      whole = false;
      if (error.name !== "AbortError") this.panel.refuse(error.message, error.control);
    }
    if (this.current !== own) return this.current ? null : false;
    this.current = null;
    this.panel.busy(false);
    return whole;
  }
}
