//! What is on the screen, from texts as a server sends them; figures are worked out by hand.

use std::time::{Duration, Instant};

use inflight_observe::read_timeline;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

use super::history::History;
use super::sample::Sample;
use super::view::draw;
use super::{FIRST_WINDOW, Screen, Wish, wish};

/// Figures at one moment: of `/metrics`, as Prometheus' format has them.
struct Told {
    seconds: u64,
    generated: u64,
    computed: u64,
    steps: u64,
    busy_s: f64,
    no_work_s: f64,
    host_waits_s: f64,
    /// First tokens that came within 0.1 s, within 0.2 s and at all.
    first: [u64; 3],
}

fn metrics(told: &Told) -> String {
    let Told { generated, computed, steps, busy_s, no_work_s, host_waits_s, first, .. } = told;
    let label = "model_name=\"smol\"";
    let idle = "inflight_device_idle_seconds_total";
    let ttft = "inflight_time_to_first_token_seconds";
    format!(
        "# HELP inflight_requests_running Sequences in batches.\n\
         # TYPE inflight_requests_running gauge\n\
         inflight_requests_running{{{label}}} 2\n\
         inflight_requests_waiting{{{label}}} 5\n\
         inflight_kv_cache_blocks{{{label}}} 200\n\
         inflight_kv_cache_free_blocks{{{label}}} 150\n\
         inflight_steps_total{{{label}}} {steps}\n\
         inflight_computed_tokens_total{{{label}}} {computed}\n\
         inflight_generated_tokens_total{{{label}}} {generated}\n\
         inflight_device_busy_seconds_total{{{label}}} {busy_s}\n\
         {idle}{{{label},cause=\"no_work\"}} {no_work_s}\n\
         {idle}{{{label},cause=\"host_waits\"}} {host_waits_s}\n\
         {ttft}_bucket{{{label},le=\"0.1\"}} {}\n\
         {ttft}_bucket{{{label},le=\"0.2\"}} {}\n\
         {ttft}_bucket{{{label},le=\"+Inf\"}} {}\n",
        first[0], first[1], first[2]
    )
}

/// Two steps as `/debug/timeline` has them: the device computes 1 to 11 ms and 21 to 31 ms; in
/// between the host collects until 12 ms and plans from 12 to 20 ms.
fn timeline() -> String {
    let event = |phase: &str, lane: u64, batch: u64, start_us: u64, len_us: u64| {
        json!({"name": format!("{phase} {batch}"), "cat": phase, "ph": "X", "pid": 1, "tid": lane,
            "ts": start_us, "dur": len_us, "args": {"batch": batch, "rows": 2, "tokens": 9,
            "sampled": 2, "launched_as": "graph", "allocated": false}})
    };
    json!([
        event("plan", 0, 7, 400, 400),
        event("launch", 0, 7, 800, 200),
        event("compute", 2, 7, 1000, 10_000),
        event("blocked", 0, 7, 1000, 10_000),
        event("collect", 0, 7, 11_000, 1000),
        event("admit", 0, 8, 12_000, 0),
        event("plan", 0, 8, 12_000, 8000),
        event("launch", 0, 8, 20_000, 1000),
        event("compute", 2, 8, 21_000, 10_000),
        event("blocked", 0, 8, 21_000, 10_000),
        event("collect", 0, 8, 31_000, 400),
    ])
    .to_string()
}

fn state() -> Value {
    let request = |id: u64, running: bool| json!({"id": id, "running": running});
    json!({"engine": {"requests": [request(3, true), request(4, true), request(5, false)]}})
}

fn sample(origin: Instant, told: &Told) -> Sample {
    let steps = read_timeline(timeline().as_bytes()).unwrap();
    let at = origin + Duration::from_secs(told.seconds);
    Sample::new(&metrics(told), &state(), steps, at).unwrap()
}

/// Between the two: 2 s, 1,600 tokens out and 3,000 computed in 100 steps, 1.5 s busy, 0.3 s
/// without work, 0.2 s waiting; 10 first tokens, of which 5 within 0.1 s.
fn history() -> History {
    let origin = Instant::now();
    let before = Told {
        seconds: 100,
        generated: 50_000,
        computed: 90_000,
        steps: 4000,
        busy_s: 60.0,
        no_work_s: 30.0,
        host_waits_s: 10.0,
        first: [1000, 1000, 1000],
    };
    let after = Told {
        seconds: 102,
        generated: 51_600,
        computed: 93_000,
        steps: 4100,
        busy_s: 61.5,
        no_work_s: 30.3,
        host_waits_s: 10.2,
        first: [1005, 1010, 1010],
    };
    let mut history = History::new("http://h:1".into(), sample(origin, &before));
    history.push(sample(origin, &after));
    history
}

fn screen(width: u16, height: u16, history: &History) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, history, "q leaves")).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect();
    (0..height).map(row).collect()
}

/// The row that begins so, or has it further right.
fn row<'a>(rows: &'a [String], text: &str) -> &'a str {
    let found = rows.iter().find(|row| row.contains(text));
    found.unwrap_or_else(|| panic!("{text}:\n{}", rows.join("\n")))
}

fn words(row: &str) -> Vec<&str> {
    row.split_whitespace().collect()
}

#[test]
fn figures_are_those_of_the_texts() {
    let rows = screen(100, 40, &history());
    row(&rows, "smol at http://h:1");
    row(&rows, "800 tokens/s generated, 1500 computed, 50.0 steps/s; 2 running, 5 waiting");
    // 1.5 of 2 s; 50 of 200 blocks.
    let gauges = row(&rows, "device busy");
    assert!(gauges.contains("device busy  75.0 %") && gauges.contains("KV cache  25.0 %"));
    assert_eq!(words(row(&rows, "no work"))[..4], ["no", "work", "15.00", "%"]);
    let waits = words(row(&rows, "host late: waits for results"));
    assert_eq!(waits[5..7], ["10.00", "%"]);
    // Half of ten lie below 0.1 s; the 90th and 99th hundredth at 4 and 4.9 fifths of the next.
    let first = words(row(&rows, "first token"));
    assert_eq!(first[first.len() - 3..], ["100.0", "180.0", "198.0"]);
    row(&rows, "latencies, ms (2 s)");
    row(&rows, "batch: 2 rows");
}

#[test]
fn a_stranger_sees_when_the_device_was_idle_and_why() {
    let rows = screen(108, 40, &history());
    // 30.4 ms over 100 columns, from 1 ms on.
    row(&rows, "the last steps, 30 ms");
    let compute: Vec<_> = row(&rows, "compute ▓").chars().skip(8).take(100).collect();
    let count = |symbol| compute.iter().filter(|cell| **cell == symbol).count();
    for (symbol, ms) in [('▓', 10.0), ('█', 10.0), ('░', 10.0)] {
        let columns = ms / 30.4 * 100.0;
        assert!((count(symbol) as f64 - columns).abs() <= 2.0, "{symbol}: {}", count(symbol));
    }
    let idle = compute.iter().position(|cell| *cell == '░').unwrap();
    assert!((32..=34).contains(&idle), "10 of 30.4 ms have gone by: {idle}");
    // Planning took most of the gap.
    let host: Vec<_> = row(&rows, "host    ").chars().skip(8).collect();
    assert_eq!(host[45], 'p');
    let last = words(row(&rows, "host late: plans"));
    assert_eq!(last[..5], ["8", "2", "9", "10.00", "10.000"]);
}

#[test]
fn having_no_work_is_told_before_it_is_over() {
    let mut history = history();
    let mut later = history.latest.clone();
    (later.num_running, later.num_waiting) = (0, 0);
    // Eight seconds on, nothing has been counted.
    later.totals.at += Duration::from_secs(8);
    history.push(later);
    let rates = history.rates();
    assert_eq!((rates.busy, &rates.idle[..]), (0.0, &[("no_work".to_owned(), 1.0)][..]));
    assert!(history.text().contains("device idle 100.00 %: no work\n"), "{}", history.text());
}

#[test]
fn text_holds_the_same_figures() {
    let text = history().text();
    for line in [
        "smol at http://h:1, over 2.0 s",
        "device busy 75.0 %",
        "800 tokens/s generated, 1500 computed in 50.0 steps/s",
        "2 running, 5 waiting, KV cache 25.0 %",
        "device idle 10.00 %: host late: waits for results",
        "first token: p50 100.0, p90 180.0, p99 198.0 ms",
    ] {
        assert!(text.lines().any(|told| told == line), "{line}:\n{text}");
    }
}

#[test]
fn small_screens_and_lost_servers_do_no_harm() {
    let mut history = history();
    history.error = Some("cannot connect".into());
    for (width, height) in [(1, 1), (10, 5), (20, 40), (200, 10), (300, 100)] {
        screen(width, height, &history);
    }
    let rows = screen(80, 24, &history);
    row(&rows, "cannot connect");
    row(&rows, "host late: plans");
}

#[test]
fn other_servers_are_known_by_their_metrics() {
    let at = Instant::now();
    assert!(Sample::new("vllm:num_requests_running 1\n", &json!({}), vec![], at).is_none());
    assert!(Sample::new("<html>", &json!([]), vec![], at).is_none());
}

#[test]
fn keys_are_heard() {
    let key = |code, modifiers| wish(&Event::Key(KeyEvent::new(code, modifiers)));
    let plain = |letter| key(KeyCode::Char(letter), KeyModifiers::NONE);
    assert_eq!((plain('q'), plain('p')), (Some(Wish::Leave), Some(Wish::Pause)));
    assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Wish::Leave));
    assert_eq!((plain('c'), wish(&Event::Resize(3, 4))), (None, None));
    let interval = Duration::from_secs(1);
    let mut screen = Screen { interval, window: FIRST_WINDOW, is_paused: false };
    (0..9).for_each(|_| screen.grant(plain('-')));
    assert_eq!(screen.window(), Duration::from_millis(20));
    (0..9).for_each(|_| screen.grant(plain('+')));
    assert_eq!(screen.window(), Duration::from_secs(2));
    screen.grant(plain('p'));
    assert!(screen.is_paused && screen.foot().contains("PAUSED"));
}
