// Turns pages without loading them anew, says what lies under the pointer, and listens to the arrow keys.
// Everything works without it: pages are made by the server, and every state has an address.

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
  if (mine !== asked) return; // a later click has its own answer
  const page = new DOMParser().parseFromString(text, "text/html");
  main().replaceWith(page.getElementById("main"));
  document.querySelector("header").replaceWith(page.querySelector("header"));
  document.title = page.title;
  about.classList.remove("shown", "lost");
  if (push) history.pushState(null, "", address);
  if (focus) main().focus({ preventScroll: true });
}

function isOurs(link) {
  return link && link.origin === location.origin && !link.hash && link.target === "";
}

function address(link) {
  return typeof link.href === "string" ? link.href : link.href.baseVal;
}

document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const span = event.target.closest("svg.strip rect[data-a]");
  const row = event.target.closest("li[data-source]");
  if (span && row) {
    event.preventDefault();
    const query = new URLSearchParams({ source: row.dataset.source, document: span.dataset.a.split(",")[0] });
    show(`document?${query}`);
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
    show(address(link));
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
  const turn = { ArrowLeft: "first-of-type", ArrowRight: "last-of-type" }[event.key];
  const link = turn && document.querySelector(`.turn a:${turn}`);
  if (isOurs(link)) {
    event.preventDefault();
    show(address(link), { focus: false });
  }
});

document.addEventListener("pointerover", (event) => {
  const span = event.target.closest("rect[data-a]");
  const token = event.target.closest(".tokens span[title]");
  if (span) {
    const [document, start, length] = span.dataset.a.split(",").map(Number);
    const source = span.closest("li").dataset.source;
    about.textContent = `document ${document} of ${source}, tokens ${start} to ${start + length}`;
  } else if (token) {
    about.textContent = token.title;
  }
  about.classList.toggle("shown", Boolean(span || token));
});

window.addEventListener("popstate", () => show(location.href, { push: false }));

// A page that changes by itself asks again, and keeps the place of who reads it.
setInterval(() => {
  const seconds = Number(document.querySelector("h1[data-again]")?.dataset.again ?? 0);
  if (seconds && !document.hidden) show(location.href, { push: false, focus: false });
}, 2000);
