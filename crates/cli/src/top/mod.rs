//! `inflight top`: a running server's dashboard in a terminal.
//!
//! [`sample`]: what the server tells, and rates between two tellings. [`view`]: how that is shown.

mod sample;
mod view;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use inflight_bench::client::{Client, ServerAddress};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use self::sample::{History, Sample};
use self::view::draw;
use crate::args::TopArgs;

/// How much of the last steps the lanes show.
const LANES_SECONDS: f64 = 0.2;

pub(crate) fn top(args: &TopArgs) -> Result<()> {
    let source = Source::new(&args.url, args.api_key.as_deref())?;
    // Before the terminal changes: a server that is not there should be said plainly.
    let first = source.sample()?;
    let mut history = History::new(args.url.to_string(), first);
    if args.once {
        std::thread::sleep(interval(args));
        history.push(source.sample()?);
        println!("{}", history.line());
        return Ok(());
    }
    let mut terminal = ratatui::try_init().context("top needs a terminal")?;
    let shown = show(&mut terminal, args, &source, &mut history);
    ratatui::restore();
    shown
}

fn interval(args: &TopArgs) -> Duration {
    Duration::from_millis(args.interval_ms)
}

/// Draws and asks in turn until somebody leaves.
fn show(
    terminal: &mut DefaultTerminal,
    args: &TopArgs,
    source: &Source,
    history: &mut History,
) -> Result<()> {
    loop {
        terminal.draw(|frame| draw(frame, history))?;
        let until = Instant::now() + interval(args);
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            if event::poll(left)? && is_leaving(&event::read()?) {
                return Ok(());
            }
        }
        match source.sample() {
            Ok(sample) => history.push(sample),
            Err(error) => history.note_error(format!("{error:#}")),
        }
    }
}

fn is_leaving(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let is_interrupt =
        key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    let leaves = matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || is_interrupt;
    key.kind == KeyEventKind::Press && leaves
}

/// Where samples come from.
struct Source {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Source {
    fn new(address: &ServerAddress, api_key: Option<&str>) -> Result<Self> {
        let client = Client::new(address.clone(), api_key).context("--api-key")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { client, runtime })
    }

    fn sample(&self) -> Result<Sample> {
        let (state, steps) = self.runtime.block_on(async {
            let state = self.client.get("/debug/state").await?;
            let path = format!("/debug/timeline?seconds={LANES_SECONDS}");
            anyhow::Ok((state, self.client.get(&path).await?))
        })?;
        let state = serde_json::from_slice(&state);
        let state = state.context("/debug/state: is this a server of Inflight?")?;
        // An engine that has done nothing yet has no steps to show.
        let steps = inflight_observe::read_timeline(&steps).unwrap_or_default();
        match Sample::new(&state, steps, Instant::now()) {
            Some(sample) => Ok(sample),
            None => bail!("/debug/state tells something else than a server of Inflight"),
        }
    }
}
