"use strict";
// The chat, and the two views' tabs.

const byId = (id) => document.getElementById(id);

/** What was said so far, as the API wants it. */
let conversation = [];
/** Ends the answer that is being written, if there is one. */
let running = null;

/** The key lives as long as this tab, and is sent to nobody but this server. */
const KEY = "inflight-api-key";

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Asks this server. Where it wants a key, or another one, so does the page. */
async function call(path, options = {}) {
  const sent = { ...options.headers, ...headers() };
  const response = await fetch(path, { ...options, headers: sent });
  if (response.ok) return response;
  const { message } = (await response.json()).error;
  if (response.status === 401) {
    byId("key").hidden = false;
    byId("key_refused").textContent = sent.Authorization ? "refused" : "";
  }
  throw new Error(message);
}

function showMessage(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  byId("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function request() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** Gives the data of server-sent events as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

/** An answer on its way: its text, its thoughts, and how fast it comes. */
class Answer {
  constructor() {
    this.box = showMessage("assistant", "");
    this.text = "";
    this.thoughts = "";
    this.tokens = 0;
    this.start = performance.now();
    this.first = null;
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    const delta = chunk.choices?.[0]?.delta;
    if (!delta) return;
    if ((delta.content || delta.reasoning_content) && this.first === null) {
      this.first = performance.now();
    }
    this.thoughts += delta.reasoning_content ?? "";
    this.text += delta.content ?? "";
    this.finish = chunk.choices[0].finish_reason ?? this.finish;
    this.show();
  }

  show() {
    this.box.replaceChildren();
    if (this.thoughts) {
      const thoughts = document.createElement("div");
      thoughts.className = "thoughts";
      thoughts.textContent = this.thoughts;
      this.box.append(thoughts);
    }
    this.box.append(this.text);
  }

  /** Tells under the answer how it went. */
  facts(stopped) {
    const facts = document.createElement("div");
    facts.className = "facts";
    const seconds = (performance.now() - (this.first ?? this.start)) / 1000;
    const parts = [];
    if (this.tokens > 1) {
      parts.push(`${this.tokens} tokens`, `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.first !== null) parts.push(`first after ${Math.round(this.first - this.start)} ms`);
    if (stopped) parts.push("stopped");
    else if (this.finish === "length") parts.push("cut: most tokens reached");
    facts.textContent = parts.join(" · ");
    this.box.append(facts);
  }
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  showMessage("user", text);
  const answer = new Answer();
  running = new AbortController();
  setRunning(true);
  let stopped = false;
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    for await (const chunk of events(response)) answer.add(chunk);
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) {
      answer.box.classList.add("failed");
      answer.text += `${answer.text ? "\n" : ""}${error.message}`;
      answer.show();
      // What failed is not part of the conversation; it can be sent again.
      conversation.pop();
    }
  }
  if (!answer.box.classList.contains("failed")) {
    conversation.push({ role: "assistant", content: answer.text });
    answer.facts(stopped);
  }
  running = null;
  setRunning(false);
}

function setRunning(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  if (!is) byId("prompt").focus();
}

function submit() {
  const text = byId("prompt").value.trim();
  if (running || !text) return;
  byId("prompt").value = "";
  ask(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  byId("messages").replaceChildren();
  byId("prompt").focus();
});

const VIEWS = ["chat", "dashboard"];

function show(view) {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    byId(name).hidden = name !== view;
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
  }
  if (location.hash !== `#${view}`) history.replaceState(null, "", `#${view}`);
  document.dispatchEvent(new CustomEvent("view", { detail: view }));
}

for (const name of VIEWS) {
  byId(`tab-${name}`).addEventListener("click", () => show(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[1 - VIEWS.indexOf(name)];
    show(other);
    byId(`tab-${other}`).focus();
  });
}
addEventListener("hashchange", () => show(location.hash === "#dashboard" ? "dashboard" : "chat"));

/** Says which model it is, which also finds out whether the server wants a key. */
function greet() {
  call("/v1/models")
    .then((response) => response.json())
    .then((models) => {
      byId("model").textContent = models.data?.[0]?.id ?? "";
      byId("key").hidden = true;
    })
    .catch(() => {});
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("api_key").value.trim());
  byId("api_key").value = "";
  greet();
});
greet();
