// Images: bytes in base64, as they travel, and canvases.

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export function image(width, height, channels, data) {
  let text = "";
  for (let i = 0; i < data.length; i += 8192) text += String.fromCharCode(...data.subarray(i, i + 8192));
  return { width, height, channels, data: btoa(text) };
}

/** Draw values, given as a function from an index to [red, green, blue]. */
export function paint(canvas, width, height, color) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const shown = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const [r, g, b] = color(i);
    shown.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(shown, 0, 0);
}

export function show(canvas, picture) {
  const data = bytes(picture.data);
  const gray = picture.channels === 1;
  paint(canvas, picture.width, picture.height, (i) =>
    gray ? [data[i], data[i], data[i]] : [data[3 * i], data[3 * i + 1], data[3 * i + 2]]);
}

export function blank(canvas, width = canvas.width, height = canvas.height) {
  canvas.width = width;  // this also clears it
  canvas.height = height;
}

/** Blue below zero, orange above, near-white at zero; t beyond [-1, 1] looks like its end. */
export function diverging(t) {
  const s = Math.min(1, Math.abs(t));
  const end = t < 0 ? [20, 80, 170] : [200, 80, 10];
  return end.map((level) => Math.round(246 + s * (level - 246)));
}

/** Dark blue over green to yellow; t in [0, 1]. */
const STOPS = [[13, 8, 60], [40, 60, 140], [30, 130, 140], [90, 190, 110], [250, 230, 60]];
export function rising(t) {
  const at = Math.min(t, 0.9999) * (STOPS.length - 1);
  const [a, b] = [STOPS[Math.floor(at)], STOPS[Math.floor(at) + 1]];
  return a.map((level, k) => Math.round(level + (at % 1) * (b[k] - level)));
}

/** Draw maps {count, height, width, data} side by side, with a gap where they are images. */
export function showMaps(canvas, maps, color, columns = 0) {
  const data = bytes(maps.data);
  const { count, height, width } = maps;
  const across = columns || Math.ceil(Math.sqrt(count * (height === 1 ? 2 : 1.5)));
  const gap = height === 1 ? 0 : 2;
  const down = Math.ceil(count / across);
  const [wide, high] = [across * (width + gap) - gap, down * (height + gap) - gap];
  const colors = new Array(wide * high).fill(null);
  for (let n = 0; n < count; n++) {
    const [left, top] = [(n % across) * (width + gap), Math.floor(n / across) * (height + gap)];
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++)
        colors[(top + y) * wide + left + x] = color(data[(n * height + y) * width + x]);
  }
  const empty = getComputedStyle(canvas).backgroundColor.match(/\d+/g)?.map(Number) ?? [128, 128, 128];
  paint(canvas, wide, high, (i) => colors[i] ?? empty);
}
