// Changes pages without a reload, draws strips, shows the token under the pointer, handles the arrow keys.
// The server makes the pages, and every state has an address, so everything except the strips works without it.

const main = () => document.getElementById("main");
const about = document.getElementById("about");
let asked = 0;

async function show(address, { push = true, focus = true } = {}) {
  const mine = ++asked;
  main().setAttribute("aria-busy", "true");
  let text;
  try {
    const answer = await fetch(address, { headers: { Accept: "text/html" } });
    text = await answer.text();
  } catch {
    if (mine !== asked) return;
    main().removeAttribute("aria-busy");
    about.textContent = "The server does not answer: start `tokenmill view` again, then reload.";
    about.classList.add("shown", "lost");
    return;
  }
  if (mine !== asked) return; // a later click has its own response
  const page = new DOMParser().parseFromString(text, "text/html");
  main().replaceWith(page.getElementById("main"));
  document.querySelector("header").replaceWith(page.querySelector("header"));
  document.title = page.title;
  about.classList.remove("shown", "lost");
  if (push) history.pushState(null, "", address);
  if (focus) main().focus({ preventScroll: true });
  watchStrips();
}

function isOurs(link) {
  return link && link.origin === location.origin && !link.hash && link.target === "";
}

// Strips. A list of rows contains its numbers; its canvas is drawn when it comes near the screen.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a900", "#999999"];
const GAP = 3; // CSS pixels between two strips

function tile(size, draw) {
  const canvas = new OffscreenCanvas(size, size);
  draw(canvas.getContext("2d"));
  return canvas;
}

function textures(context, scale) {
  const style = getComputedStyle(document.documentElement);
  const [ink, paper, line] = ["--ink", "--paper", "--line"].map((name) => style.getPropertyValue(name));
  const size = Math.round(4 * scale);
  const dotted = (colour) => (tiny) => {
    tiny.fillStyle = colour;
    tiny.globalAlpha = 0.22;
    tiny.fillRect(0, 0, size, size);
    tiny.globalAlpha = 0.9;
    tiny.fillRect(0, 0, size / 4, size / 4);
    tiny.fillRect(size / 2, size / 2, size / 4, size / 4);
  };
  const wide = Math.round(6 * scale);
  const hatched = (tiny) => {
    tiny.strokeStyle = line;
    tiny.lineWidth = 1.5 * scale;
    for (const shift of [-wide, 0, wide]) {
      tiny.moveTo(shift - 1, wide + 1);
      tiny.lineTo(shift + wide + 1, -1);
    }
    tiny.stroke();
  };
  return {
    ink,
    paper,
    masked: COLOURS.map((colour) => context.createPattern(tile(size, dotted(colour)), "repeat")),
    padding: context.createPattern(tile(wide, hatched), "repeat"),
  };
}

function drawStrips(list) {
  const canvas = list.querySelector("canvas") ?? list.appendChild(document.createElement("canvas"));
  canvas.setAttribute("aria-hidden", "true"); // the links next to it describe it
  const numbers = (list.strips ??= JSON.parse(list.dataset.strips));
  const scale = window.devicePixelRatio || 1;
  const wide = (canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale)));
  canvas.height = Math.round(canvas.clientHeight * scale);
  const context = canvas.getContext("2d", { alpha: false });
  const paint = textures(context, scale);
  const line = canvas.height / numbers.length;
  const high = Math.round(line - GAP * scale);
  context.fillStyle = paint.paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  numbers.forEach(([room, spans, trained, bos, eos], place) => {
    const top = Math.round(place * line + (GAP * scale) / 2);
    const x = (column) => Math.round((column * wide) / room);
    const fill = (begin, end, style) => {
      context.fillStyle = style;
      context.fillRect(x(begin), top, Math.max(1, x(end) - x(begin)), high);
    };
    fill(0, room, paint.padding);
    let run = 0;
    let shade = -1;
    const edges = [];
    for (let at = 0; at < spans.length; at += 4) {
      const [column, number, start, length] = spans.slice(at, at + 4);
      const end = column + length;
      const next = number % COLOURS.length;
      shade = next === shade ? (next + 1) % COLOURS.length : next;
      fill(column, end, paint.paper);
      fill(column, end, paint.masked[shade]);
      while (run < trained.length && trained[run] < end) {
        fill(Math.max(trained[run], column), Math.min(trained[run + 1], end), COLOURS[shade]);
        if (trained[run + 1] > end) break; // it continues in the next span
        run += 2;
      }
      if (start === 0) edges.push(column);
    }
    for (const column of edges) {
      context.fillStyle = paint.ink;
      context.fillRect(x(column), top, Math.max(1, scale), high);
    }
    mark(context, bos.map(x), top, high, scale, paint, 0);
    mark(context, eos.map((column) => x(column + 1) - 3 * scale), top, high, scale, paint, 1);
  });
}

// BOS is a mark at the top, EOS one at the bottom: their position distinguishes them on any colour.
function mark(context, places, top, high, scale, paint, below) {
  const size = 3 * scale;
  for (const left of places) {
    context.fillStyle = paint.paper;
    context.fillRect(left, below ? top + high - size - scale : top, size + scale, size + scale);
    context.fillStyle = paint.ink;
    context.fillRect(left, below ? top + high - size : top, size, size);
  }
}

const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.strips) drawStrips(target);
}, { rootMargin: "400px" });

function watchStrips() {
  for (const list of document.querySelectorAll("ol.strips")) {
    if (list.getBoundingClientRect().top < innerHeight) drawStrips(list);
    near.observe(list);
  }
}

function redraw() {
  for (const list of document.querySelectorAll("ol.strips")) if (list.strips) drawStrips(list);
}
let width = innerWidth;
window.addEventListener("resize", () => {
  if (width !== innerWidth) requestAnimationFrame(redraw);
  width = innerWidth;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.addEventListener("toggle", redraw, true);
watchStrips();

// The token under the pointer: the span is known here, and its token is requested.

function spotAt(event) {
  const list = event.target.closest?.("ol.strips");
  if (!list?.strips || event.target.tagName !== "CANVAS") return null;
  const place = Math.floor((event.offsetY / event.target.clientHeight) * list.strips.length);
  const line = list.querySelectorAll("li")[place];
  if (!line) return null;
  const [room, spans] = list.strips[place];
  const column = Math.min(room - 1, Math.floor((event.offsetX / event.target.clientWidth) * room));
  const [slot, strip, ...name] = line.dataset.at.split(",");
  const spot = { list, slot, strip, source: name.join(","), base: list.dataset.base, link: line.querySelector("a") };
  for (let at = 0, before = 0; at < spans.length; before += spans[at + 3], at += 4) {
    const inside = column - spans[at];
    if (inside >= 0 && inside < spans[at + 3]) {
      return { ...spot, document: spans[at + 1], position: spans[at + 2] + inside, ordinal: before + inside };
    }
  }
  return spot;
}

const ASKED = 64; // tokens at a time
const tokens = new Map();

async function tokenAt(spot) {
  const first = spot.ordinal - (spot.ordinal % ASKED);
  const query = new URLSearchParams({ step: spot.list.dataset.step, slot: spot.slot, strip: spot.strip, first });
  const address = `${spot.base}api/strip?${query}&count=${ASKED}`;
  if (!tokens.has(address)) {
    if (tokens.size > 200) tokens.clear();
    tokens.set(address, fetch(address).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null));
  }
  return (await tokens.get(address))?.tokens.tokens[spot.ordinal - first];
}

let pointed = 0;
document.addEventListener("pointermove", (event) => {
  const spot = spotAt(event);
  if (!spot) return;
  const mine = ++pointed;
  const padding = spot.ordinal === undefined;
  const where = padding
    ? `slot ${spot.slot} of ${spot.source}: padding`
    : `document ${spot.document} of ${spot.source}, position ${spot.position}`;
  about.textContent = where;
  about.classList.add("shown");
  if (padding) return;
  setTimeout(async () => {
    if (mine !== pointed) return; // the pointer has moved
    const token = await tokenAt(spot);
    if (mine !== pointed || !token) return;
    const shown = token.continues ? "part of the character before" : JSON.stringify(token.text);
    const text = token.text === null ? "" : `${shown}, `;
    about.textContent = `${text}id ${token.id}, ${where}, ${token.trained ? "trained" : "not trained"}`;
  }, 40);
});

document.addEventListener("pointerover", (event) => {
  if (event.target.tagName === "CANVAS") return;
  const token = event.target.closest(".tokens span[title]");
  if (token) about.textContent = token.title;
  if (!about.classList.contains("lost")) about.classList.toggle("shown", Boolean(token));
  pointed++;
});

document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const spot = spotAt(event);
  if (spot) {
    const query = new URLSearchParams({ source: spot.source, document: spot.document });
    show(spot.ordinal === undefined ? spot.link.href : `${spot.base}document?${query}`);
    return;
  }
  const timeline = event.target.closest("figure.timeline svg");
  if (timeline && !event.target.closest("a")) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(timeline.getScreenCTM().inverse());
    const edges = timeline.dataset.edges.split(" ").map((edge) => edge.split(":").map(Number));
    const next = edges.findIndex(([, x]) => x > point.x);
    if (next > 0) {
      const [[from, left], [to, right]] = [edges[next - 1], edges[next]];
      show(`step?step=${Math.floor(from + ((to - from) * (point.x - left)) / (right - left))}`);
    }
    return;
  }
  const link = event.target.closest("a[href]");
  if (isOurs(link)) {
    event.preventDefault();
    show(link.href);
  }
});

document.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  show(`${form.getAttribute("action")}?${query}`);
});

document.addEventListener("input", (event) => {
  const name = event.target.dataset.for;
  if (name) event.target.form.elements[name].value = event.target.value;
});

document.addEventListener("change", (event) => {
  if (event.target.dataset.for) event.target.form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.altKey || event.ctrlKey || event.metaKey) return;
  const arrow = { ArrowLeft: "←", ArrowRight: "→" }[event.key];
  const link = arrow && [...document.querySelectorAll(".turn a")].find((each) => each.textContent.includes(arrow));
  if (isOurs(link)) {
    event.preventDefault();
    show(link.href, { focus: false });
  }
});

window.addEventListener("popstate", () => show(location.href, { push: false }));

// A page that changes reloads itself, and keeps the reader's scroll position.
setInterval(() => {
  const seconds = Number(document.querySelector("h1[data-again]")?.dataset.again ?? 0);
  if (seconds && !document.hidden) show(location.href, { push: false, focus: false });
}, 2000);
