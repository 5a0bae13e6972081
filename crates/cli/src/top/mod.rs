//! `inflight top`: a running server's dashboard in a terminal.
//!
//! Reading order: [`source`] (asks the server), [`exposition`] (what `/metrics` says), [`sample`]
//! (the server at one moment, and rates between two), [`history`] (all so far), [`strip`] (who was
//! in the batch), [`lanes`] (the last steps), [`view`] (how all is shown).

mod exposition;
mod history;
mod lanes;
mod sample;
mod source;
mod strip;
#[cfg(test)]
mod tests;
mod view;

use std::io::{IsTerminal, stdout};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use self::history::History;
use self::source::Source;
use self::view::draw;
use crate::args::TopArgs;

/// How much of the last steps the lanes may show, in milliseconds, and at first.
const WINDOWS_MS: [u64; 7] = [20, 50, 100, 200, 500, 1000, 2000];
const FIRST_WINDOW: usize = 3;

pub(crate) fn top(args: &TopArgs) -> Result<()> {
    ensure!(
        args.once || stdout().is_terminal(),
        "top draws on a terminal, and this is none; --once prints figures as text"
    );
    let source = Source::new(&args.url, args.api_key.as_deref())?;
    let interval = Duration::from_millis(args.interval_ms);
    let mut screen = Screen { interval, window: FIRST_WINDOW, is_paused: false };
    // Before the terminal changes: a server that is not there should be said plainly.
    let first = source.sample(screen.window())?;
    let mut history = History::new(args.url.to_string(), first);
    if args.once {
        std::thread::sleep(interval);
        history.push(source.sample(screen.window())?);
        print!("{}", history.text());
        return Ok(());
    }
    let mut terminal = ratatui::try_init().context("top needs a terminal")?;
    let shown = screen.run(&mut terminal, &source, &mut history);
    ratatui::restore();
    shown
}

/// What the user has chosen.
struct Screen {
    interval: Duration,
    /// Which of [`WINDOWS_MS`].
    window: usize,
    is_paused: bool,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Leave,
    Pause,
    Longer,
    Shorter,
}

impl Screen {
    /// Draws and asks in turn until somebody leaves.
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        source: &Source,
        history: &mut History,
    ) -> Result<()> {
        let mut due = Instant::now() + self.interval;
        loop {
            terminal.draw(|frame| draw(frame, history, &self.foot()))?;
            if event::poll(due.saturating_duration_since(Instant::now()))? {
                let wish = wish(&event::read()?);
                if wish == Some(Wish::Leave) {
                    return Ok(());
                }
                self.grant(wish);
                continue;
            }
            due = Instant::now() + self.interval;
            if self.is_paused {
                continue;
            }
            match source.sample(self.window()) {
                Ok(sample) => history.push(sample),
                Err(error) => history.error = Some(format!("{error:#}").replace('\n', "; ")),
            }
        }
    }

    fn window(&self) -> Duration {
        Duration::from_millis(WINDOWS_MS[self.window])
    }

    fn grant(&mut self, wish: Option<Wish>) {
        match wish {
            Some(Wish::Pause) => self.is_paused = !self.is_paused,
            Some(Wish::Longer) => self.window = (self.window + 1).min(WINDOWS_MS.len() - 1),
            Some(Wish::Shorter) => self.window = self.window.saturating_sub(1),
            Some(Wish::Leave) | None => {}
        }
    }

    fn foot(&self) -> String {
        let pause = if self.is_paused { "PAUSED, p goes on" } else { "p pauses" };
        let (window, interval) = (WINDOWS_MS[self.window], self.interval.as_millis());
        format!("q leaves  {pause}  + - steps of the last {window} ms  every {interval} ms")
    }
}

/// `None`: nothing, or that the terminal has another size.
fn wish(event: &Event) -> Option<Wish> {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return None;
    };
    match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Wish::Leave),
        KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Leave),
        KeyCode::Char('p' | ' ') => Some(Wish::Pause),
        KeyCode::Char('+' | '=') => Some(Wish::Longer),
        KeyCode::Char('-') => Some(Wish::Shorter),
        _ => None,
    }
}
