"use strict";
// The dashboard: figures from /metrics, who holds what from /debug/state, steps from
// /debug/timeline. Asks only while it is seen.

const POLL_MS = 500;
const BATCH_SECONDS = 30;
/** Over how long rates are told: steps count when they end, so over less they would jump about. */
const RATES_MS = 5000;
const LANES = ["host", "h2d", "compute", "d2h"];
const PHASES = {
  admit: "#8250df", plan: "#bf8700", stage: "#1a7f37", launch: "#0969da", late: "#d4388c",
  collect: "#0a7b83", blocked: "#8c959f", h2d: "#218bff", compute: "#218bff", d2h: "#218bff",
};
const PHASE_NAMES = {
  late: "grammar masks", blocked: "waits for the device", compute: "device works",
};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** A request's colour: neighbouring numbers get distant hues. */
const colour = (id) => `hsl(${(id * 137.508) % 360} 65% 50%)`;

let seen = false;
let paused = false;
/** Counts at the last looks, the oldest first. */
let looks = [];
let timeline = [];
/** Requests in the batch: id, lane, when they came and when they left. */
let members = [];

/** Samples of the text format, as {name: [{labels, value}]}. */
function parseMetrics(text) {
  const metrics = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value;
    }
    (metrics[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return metrics;
}

const sum = (samples) => (samples ?? []).reduce((total, sample) => total + sample.value, 0);

function figures(metrics, state, now) {
  const idle = metrics.inflight_device_idle_seconds_total ?? [];
  const current = {
    now,
    generated: sum(metrics.inflight_generated_tokens_total),
    busy: sum(metrics.inflight_device_busy_seconds_total),
  };
  put("running", sum(metrics.inflight_requests_running));
  put("waiting", sum(metrics.inflight_requests_waiting));
  put("generated", current.generated);
  put("blocks", sum(metrics.inflight_kv_cache_blocks));
  put("cache", `${(100 * sum(metrics.inflight_kv_cache_usage_ratio)).toFixed(1)} %`);
  latency("first", state.latencies.first_token_s);
  latency("inter", state.latencies.inter_token_s);
  looks.push(current);
  while (looks.length > 2 && now - looks[1].now >= RATES_MS) looks.shift();
  const [before] = looks;
  if (now > before.now) {
    const seconds = (now - before.now) / 1000;
    put("rate", `${((current.generated - before.generated) / seconds).toFixed(0)}/s`);
    const busy = Math.min(1, Math.max(0, (current.busy - before.busy) / seconds));
    put("busy", `${(100 * busy).toFixed(1)} %`);
  }
  const total = sum(idle) + current.busy;
  const rows = [...idle].sort((a, b) => b.value - a.value).map((sample) => {
    const row = document.createElement("tr");
    const cause = state.steps?.causes?.[sample.labels.cause];
    const cells = [cause?.name ?? sample.labels.cause, `${sample.value.toFixed(3)} s`,
      `${(100 * sample.value / total).toFixed(2)} %`, cause?.meaning ?? ""];
    for (const text of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  byId("idle").tBodies[0].replaceChildren(...rows);
  byId("idle").hidden = rows.length === 0;
}

function put(id, value) {
  byId(id).textContent = value;
}

function latency(id, quantiles) {
  const ms = (s) => {
    if (s == null) return "–";
    return s < 1 ? `${Number((1000 * s).toPrecision(3))} ms` : `${s.toFixed(2)} s`;
  };
  put(id, ms(quantiles.p50));
  put(`${id}99`, ms(quantiles.p99));
}

/** Clears a canvas for drawing at the screen's own resolution. */
function begin(id) {
  const canvas = byId(id);
  const scale = devicePixelRatio || 1;
  // The attribute says how high it is to look; drawing changes it.
  const height = Number(canvas.dataset.height ??= canvas.getAttribute("height"));
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

// ---- timeline ----

function drawTimeline() {
  const { context, width, height } = begin("timeline");
  const margin = 58;
  const lane = (height - 8) / LANES.length;
  const seconds = Number(byId("window").value);
  const end = timeline.reduce((last, event) => Math.max(last, event.ts + event.dur), 0);
  const start = end - seconds * 1e6;
  const x = (ts) => margin + (ts - start) / (end - start || 1) * (width - margin - 6);
  context.fillStyle = css("--muted");
  LANES.forEach((name, i) => context.fillText(name, 8, 4 + lane * i + lane / 2));
  const shown = [];
  for (const event of timeline) {
    if (event.ph !== "X" || event.ts + event.dur < start) continue;
    const left = Math.max(margin, x(event.ts));
    const right = Math.max(x(event.ts + event.dur), left + 0.5);
    const box = { left, right, top: 6 + lane * event.tid, height: lane - 6, event };
    if (event.cat === "bubble") hatch(context, box);
    else {
      context.fillStyle = PHASES[event.cat] ?? css("--muted");
      context.globalAlpha = event.tid > 0 && event.args.batch % 2 ? 0.65 : 1;
      context.fillRect(box.left, box.top, box.right - box.left, box.height);
      context.globalAlpha = 1;
    }
    const label = shownName(event);
    if (context.measureText(label).width + 8 < box.right - box.left) {
      context.fillStyle = event.cat === "bubble" ? css("--ink") : "#fff";
      context.fillText(label, box.left + 4, box.top + box.height / 2 + 4);
    }
    shown.push(box);
  }
  byId("timeline").boxes = shown;
}

/** What a box says, in the legend's words. */
function shownName({ cat, name, args }) {
  if (cat === "bubble") return `idle: ${args.cause}`;
  return cat === "blocked" ? `waits for ${args.batch}` : name;
}

function hatch(context, box) {
  const width = box.right - box.left;
  context.save();
  context.strokeStyle = css("--alarm");
  context.beginPath();
  context.rect(box.left, box.top, width, box.height);
  context.clip();
  for (let at = box.left - box.height; at < box.right; at += 6) {
    context.moveTo(at, box.top + box.height);
    context.lineTo(at + box.height, box.top);
  }
  context.stroke();
  context.restore();
}

function hover(event) {
  const { offsetX, offsetY } = event;
  const boxes = byId("timeline").boxes ?? [];
  const under = (box) => offsetX >= box.left - 1 && offsetX <= box.right + 1
    && offsetY >= box.top && offsetY <= box.top + box.height;
  const found = boxes.findLast(under)?.event;
  if (!found) return;
  const ms = found.dur / 1000;
  const took = ms < 1 ? `${found.dur.toFixed(1)} µs` : `${ms.toFixed(2)} ms`;
  const { rows, tokens } = found.args;
  const what = rows === undefined ? "" : `: ${rows} rows, ${tokens} tokens`;
  put("hover", `${shownName(found)}${what}, ${took}`);
}

// ---- batch ----

function follow(requests, now) {
  const running = new Set(requests.filter((request) => request.running).map(({ id }) => id));
  for (const member of members) {
    if (member.left === null && !running.delete(member.id)) member.left = now;
  }
  for (const id of running) {
    const taken = new Set(members.filter((m) => m.left === null).map((m) => m.lane));
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    members.push({ id, lane, came: now, left: null });
  }
  const oldest = now - BATCH_SECONDS * 1000;
  members = members.filter((member) => member.left === null || member.left > oldest);
}

function drawBatch(now) {
  const { context, width, height } = begin("batch");
  const lanes = Math.max(8, ...members.map((member) => member.lane + 1));
  const lane = height / lanes;
  const x = (time) => width * (1 - (now - time) / (BATCH_SECONDS * 1000));
  for (const member of members) {
    const left = Math.max(0, x(member.came));
    const right = x(member.left ?? now);
    context.fillStyle = colour(member.id);
    const gap = lane > 4 ? 1 : 0;
    context.fillRect(left, member.lane * lane, Math.max(1, right - left), lane - gap);
  }
}

// ---- KV cache ----

function drawMap(engine) {
  const { context, width, height } = begin("map");
  const side = 9;
  const columns = Math.floor(width / side);
  const cells = columns * Math.floor(height / side);
  const perCell = Math.ceil(engine.num_blocks / cells);
  put("square", perCell === 1 ? "a block" : `${perCell} blocks`);
  const owners = new Map();
  for (const request of engine.requests) {
    for (const block of request.blocks) owners.set(Math.floor(block / perCell), request.id);
  }
  const used = Math.ceil(engine.num_blocks / perCell);
  context.strokeStyle = css("--line");
  for (let cell = 0; cell < used; cell += 1) {
    const [left, top] = [cell % columns * side + 1, Math.floor(cell / columns) * side + 1];
    if (owners.has(cell)) {
      context.fillStyle = colour(owners.get(cell));
      context.fillRect(left, top, side - 2, side - 2);
    } else context.strokeRect(left + 0.5, top + 0.5, side - 3, side - 3);
  }
  put("cached", engine.num_cached_blocks);
}

// ---- asking ----

async function poll() {
  const [text, state] = await Promise.all([
    call("/metrics").then((response) => response.text()),
    call("/debug/state").then((response) => response.json()),
  ]);
  const now = performance.now();
  figures(parseMetrics(text), state, now);
  if (state.engine) {
    follow(state.engine.requests, now);
    drawMap(state.engine);
  }
  drawBatch(now);
  if (!paused) {
    const seconds = byId("window").value;
    timeline = await call(`/debug/timeline?seconds=${seconds}`).then((response) => response.json());
    timeline = timeline.filter((event) => event.ph === "X");
  }
  drawTimeline();
}

async function loop() {
  while (seen) {
    if (!document.hidden) {
      try {
        await poll();
      } catch (error) {
        put("hover", `There is nothing to show: ${error.message}`);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

document.addEventListener("view", ({ detail }) => {
  const starts = detail === "dashboard" && !seen;
  seen = detail === "dashboard";
  if (starts) loop();
});
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
});
byId("download").addEventListener("click", async () => {
  const link = document.createElement("a");
  const steps = await call("/debug/timeline?seconds=5").then((response) => response.blob());
  link.href = URL.createObjectURL(steps);
  link.download = "inflight-timeline.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
/** The legend's entry for what is hatched. */
function idleEntry() {
  const entry = document.createElement("span");
  const mark = document.createElement("i");
  mark.className = "idle";
  entry.append(mark, "device idle");
  return entry;
}
byId("window").addEventListener("change", drawTimeline);
byId("timeline").addEventListener("mousemove", hover);
byId("legend").append(...Object.entries(PHASES).filter(([phase]) => !["h2d", "d2h"].includes(phase))
  .map(([phase, hue]) => {
    const entry = document.createElement("span");
    const mark = document.createElement("i");
    mark.style.background = hue;
    entry.append(mark, PHASE_NAMES[phase] ?? phase);
    return entry;
  }), idleEntry());
show(location.hash === "#dashboard" ? "dashboard" : "chat");
