// The tabs, and the views behind them.

import { facts } from "./server.js";
import { Draw } from "./draw.js";
import { Restore } from "./restore.js";
import { Generate } from "./generate.js";
import { Inside } from "./inside.js";
import { Segment } from "./segment.js";

const VIEWS = { draw: Draw, restore: Restore, generate: Generate, inside: Inside, segment: Segment };
const tabs = [...document.querySelectorAll("[role=tab]")];
const opened = new Map();

let visible = null;

function select(name, known) {
  if (visible !== name) opened.get(visible)?.close();
  visible = name;
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(`view-${tab.id.slice(4)}`).hidden = !chosen;
  }
  if (!opened.has(name)) {
    const panel = new VIEWS[name](name, known.views[name], known);
    opened.set(name, panel);
    if (!panel.empty) panel.choose();
  } else {
    opened.get(name).reopen();
  }
  history.replaceState(null, "", `/#${name}`);  // without the token
}

try {
  const known = await facts();
  document.getElementById("loading").hidden = true;
  tabs.forEach((tab, k) => {
    tab.addEventListener("click", () => select(tab.id.slice(4), known));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  });
  const wanted = location.hash.slice(1);
  select(Object.hasOwn(VIEWS, wanted) ? wanted : "draw", known);
} catch (error) {
  Object.assign(document.getElementById("loading"), { textContent: error.message, hidden: false });
}
