//! `inflight chat`: talk to a model.

use std::io::{self, IsTerminal};

use anyhow::{Context, Result};
use inflight_tokenizer::{ChatInput, Special, TextPosition};
use serde_json::{Value, json};

use crate::answer::{Question, answer};
use crate::args::{ChatArgs, PolicyArgs, SamplingArgs, Switch};
use crate::models::ModelArgument;
use crate::progress::is_watched;
use crate::resolve::Workload;
use crate::run::print;
use crate::start::{Running, start};

pub(crate) fn chat(args: ChatArgs) -> Result<()> {
    let model = ModelArgument::parse(&args.model)?.fetch(is_watched(args.engine.no_progress))?;
    let workload = Workload::alone(args.steps.overlap == Switch::On);
    let running = start(&model, &args.engine, &args.steps, &PolicyArgs::default(), workload)?;
    running.tokenizer.chat_template()?;
    let is_watched = io::stdin().is_terminal();
    if is_watched {
        eprintln!("{}", running.summary);
        eprintln!("Ctrl-C stops an answer, /reset forgets the conversation, /exit leaves.");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let conversation = Conversation {
        running: &running,
        sampling: &args.sampling,
        seed: args.engine.seed,
        is_watched,
        messages: Vec::new(),
    };
    let result = runtime.block_on(conversation.hold());
    // A thread may still be waiting for a line that nobody will type.
    runtime.shutdown_background();
    result.and(running.stop())
}

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Empty,
    Say(&'a str),
    Reset,
    Exit,
    Unknown(&'a str),
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        match line.trim() {
            "" => Self::Empty,
            "/reset" => Self::Reset,
            "/exit" | "/quit" => Self::Exit,
            command if command.starts_with('/') => Self::Unknown(command),
            text => Self::Say(text),
        }
    }
}

struct Conversation<'a> {
    running: &'a Running,
    sampling: &'a SamplingArgs,
    seed: u64,
    is_watched: bool,
    messages: Vec<Value>,
}

impl Conversation<'_> {
    async fn hold(mut self) -> Result<()> {
        self.reset();
        while let Some(line) = self.next_line().await? {
            match Line::parse(&line) {
                Line::Empty => {}
                Line::Say(text) => self.reply(text).await?,
                Line::Reset => self.reset(),
                Line::Exit => break,
                Line::Unknown(command) => eprintln!("{command} is not /reset or /exit"),
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        let system = self.sampling.system.iter();
        self.messages = system.map(|s| json!({"role": "system", "content": s})).collect();
    }

    /// The next line; `None` at the end of input and when interrupted.
    async fn next_line(&self) -> Result<Option<String>> {
        if self.is_watched {
            print("\n> ")?;
        }
        let read = tokio::task::spawn_blocking(|| io::stdin().lines().next().transpose());
        tokio::select! {
            line = read => line?.context("standard input is not text"),
            _ = tokio::signal::ctrl_c() => Ok(None),
        }
    }

    /// Answers, and remembers both sides. What cannot be answered is forgotten.
    async fn reply(&mut self, text: &str) -> Result<()> {
        self.messages.push(json!({"role": "user", "content": text}));
        let interrupt = async {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending().await
            }
        };
        let prompt = self.prompt()?;
        let limits = self.running.handle().limits();
        if prompt.len() >= limits.max_sequence_len() {
            self.messages.pop();
            let (len, max) = (prompt.len(), limits.max_sequence_len());
            eprintln!(
                "the conversation has {len} tokens, and {max} is the limit: /reset starts over"
            );
            return Ok(());
        }
        let question = Question {
            prompt,
            position: TextPosition::Start,
            sampling: self.sampling,
            seed: self.seed,
        };
        let answered = answer(self.running, question, print, interrupt).await?;
        print("\n")?;
        if answered.is_cut {
            eprintln!("(cut: no room for more)");
        }
        self.messages.push(json!({"role": "assistant", "content": answered.text}));
        Ok(())
    }

    fn prompt(&self) -> Result<Vec<u32>> {
        let messages = Value::Array(self.messages.clone());
        let tokenizer = &self.running.tokenizer;
        let text = tokenizer.render_chat(&ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            extra: None,
        })?;
        Ok(tokenizer.encode_prompt(&text, Special::Parse)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        assert_eq!(Line::parse(" Hi there \n"), Line::Say("Hi there"));
        assert_eq!(Line::parse(" \n"), Line::Empty);
        assert_eq!(Line::parse("/reset"), Line::Reset);
        assert_eq!(Line::parse("/exit"), Line::Exit);
        assert_eq!(Line::parse("/help"), Line::Unknown("/help"));
    }
}
