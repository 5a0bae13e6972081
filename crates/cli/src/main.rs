//! The binary `inflight`: arguments to a resolved, frozen configuration, and the commands.
//!
//! Reading order: [`args`] (what users write), [`models`] and [`hub`] (which files that means),
//! [`device`] (what computes), [`resolve`] (numbers instead of defaults), [`memory`] (whose is
//! what), [`assembly`] (all that to an engine), [`start`] (which then runs), [`serve`], [`run`],
//! [`chat`], [`batch`], [`doctor`], [`bench`],
//! [`simulate`], [`replay`], [`tune`] (the commands), [`answer`] (one prompt's text as it comes),
//! [`side_by_side`] (work on several threads).
//!
//! Invariant: the only room that reads arguments and environment.
//! Invariant: stdout has answers only; all else goes to stderr.

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

mod access;
mod answer;
mod args;
mod assembly;
mod batch;
mod bench;
mod cache_file;
mod chat;
mod device;
mod doctor;
mod hub;
mod kv_capacity;
mod logging;
mod memory;
mod models;
mod policy;
mod pooling;
mod progress;
mod replay;
mod resolve;
mod run;
mod serve;
mod side_by_side;
mod signals;
mod simulate;
mod start;
mod summary;
mod swap;
mod text;
mod top;
mod trace;
mod trace_file;
mod tune;

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::init(cli.log_level.as_deref(), cli.command.default_log_level());
    let result = match cli.command {
        Command::Serve(args) => serve::serve(*args),
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::chat(args),
        Command::Batch(args) => batch::batch(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Bench(args) => bench::bench(&args.command),
        Command::Replay(args) => replay::replay(&args),
        Command::Simulate(args) => simulate::simulate_load(&args),
        Command::Top(args) => top::top(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Tune(args) => tune::tune(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
