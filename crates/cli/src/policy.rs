//! Scheduling flags to the policy that an engine gets.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{Result, ensure};
use inflight_engine::{Batching, Gate, Mixing, Order, Policy, Targets};

use crate::args::{BatchingChoice, MixingChoice, OrderChoice, PolicyArgs};

/// Resolves `args` for an engine of `max_num_seqs` sequences.
pub(crate) fn resolve_policy(args: &PolicyArgs, max_num_seqs: usize) -> Result<Policy> {
    let is_static = args.batching == BatchingChoice::Static;
    ensure!(
        args.static_batch_size.is_none() || is_static,
        "--static-batch-size goes only with --batching static"
    );
    let batch_size = args.static_batch_size.map_or(max_num_seqs, NonZeroUsize::get);
    let batching = if is_static { Batching::Static { batch_size } } else { Batching::Continuous };
    let mixing = match args.mixing {
        MixingChoice::Chunked => Mixing::Chunked,
        MixingChoice::PrefillFirst => Mixing::PrefillFirst,
        MixingChoice::DecodeFirst => Mixing::DecodeFirst,
    };
    ensure!(
        !is_static || mixing == Mixing::Chunked,
        "--mixing: a static batch computes all its prompts first"
    );
    let targets = Targets {
        itl: millis("--target-itl-ms", args.target_itl_ms)?,
        ttft: millis("--target-ttft-ms", args.target_ttft_ms)?,
    };
    ensure!(
        targets.itl.is_none() || (mixing == Mixing::Chunked && !is_static),
        "--target-itl-ms needs --batching continuous and --mixing chunked: prompts in batches of \
         their own hold up everybody else"
    );
    Ok(Policy {
        batching,
        mixing,
        order: match args.scheduling_policy {
            OrderChoice::Fcfs => Order::Fcfs,
            OrderChoice::Priority => Order::Priority,
            OrderChoice::Fair => Order::Fair,
        },
        gate: resolve_gate(args)?,
        max_batch_prefill_tokens: args.max_batch_prefill_tokens.map(NonZeroUsize::get),
        max_batch_total_tokens: args.max_batch_total_tokens.map(NonZeroUsize::get),
        targets,
        max_queue_time: millis("--max-queue-time-ms", args.max_queue_time_ms)?,
    })
}

fn resolve_gate(args: &PolicyArgs) -> Result<Gate> {
    let usual_ratio = match args.mixing {
        MixingChoice::DecodeFirst => Gate::USUAL.waiting_served_ratio,
        MixingChoice::Chunked | MixingChoice::PrefillFirst => 0.0,
    };
    let waiting_served_ratio = args.waiting_served_ratio.unwrap_or(usual_ratio);
    ensure!(
        waiting_served_ratio.is_finite() && waiting_served_ratio >= 0.0,
        "--waiting-served-ratio is {waiting_served_ratio}; it must be at least 0"
    );
    ensure!(
        args.max_waiting_tokens.is_none() || waiting_served_ratio > 0.0,
        "--max-waiting-tokens goes only with a --waiting-served-ratio over 0: prompts never wait"
    );
    let usual_steps = Gate::USUAL.max_waiting_tokens;
    let max_waiting_tokens = args.max_waiting_tokens.unwrap_or(usual_steps);
    Ok(Gate { waiting_served_ratio, max_waiting_tokens })
}

fn millis(flag: &str, ms: Option<f64>) -> Result<Option<Duration>> {
    let Some(ms) = ms else { return Ok(None) };
    let duration = Duration::try_from_secs_f64(ms / 1e3).ok();
    let duration = duration.filter(|duration| !duration.is_zero());
    ensure!(duration.is_some(), "{flag} is {ms}; it must be over 0");
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn resolved(flags: &str) -> Result<Policy> {
        let arguments = ["inflight", "serve"].into_iter().chain(flags.split_whitespace());
        let Command::Serve(args) = Cli::try_parse_from(arguments)?.command else {
            panic!("another command")
        };
        resolve_policy(&args.policy, 64)
    }

    #[test]
    fn flags_become_a_policy() {
        let usual = Policy {
            gate: Gate { max_waiting_tokens: 20, ..Gate::default() },
            ..Policy::default()
        };
        assert_eq!(resolved("").unwrap(), usual, "throughput, chunks, first come first served");
        let all = resolved(
            "--mixing decode-first --max-waiting-tokens 7 --max-batch-prefill-tokens 100 \
             --max-batch-total-tokens 9000 --scheduling-policy fair --max-queue-time-ms 1.5 \
             --target-ttft-ms 200",
        );
        let expected = Policy {
            batching: Batching::Continuous,
            mixing: Mixing::DecodeFirst,
            order: Order::Fair,
            gate: Gate { waiting_served_ratio: 0.3, max_waiting_tokens: 7 },
            max_batch_prefill_tokens: Some(100),
            max_batch_total_tokens: Some(9000),
            targets: Targets { itl: None, ttft: Some(Duration::from_millis(200)) },
            max_queue_time: Some(Duration::from_micros(1500)),
        };
        assert_eq!(all.unwrap(), expected);
        let batching = |flags: &str| resolved(flags).unwrap().batching;
        assert_eq!(batching("--batching static"), Batching::Static { batch_size: 64 });
        let flags = "--batching static --static-batch-size 4";
        assert_eq!(batching(flags), Batching::Static { batch_size: 4 });
    }

    #[test]
    fn what_does_not_go_together_is_named() {
        let check = |flags: &str, named: &str| {
            let error = resolved(flags).unwrap_err().to_string();
            assert!(error.contains(named), "{flags}: {error}");
        };
        check("--static-batch-size 4", "--static-batch-size");
        check("--batching static --mixing prefill-first", "--mixing");
        check("--mixing prefill-first --target-itl-ms 10", "--target-itl-ms");
        check("--batching static --target-itl-ms 10", "--target-itl-ms");
        check("--target-itl-ms 0", "--target-itl-ms");
        check("--target-ttft-ms nan", "--target-ttft-ms");
        check("--max-queue-time-ms 0", "--max-queue-time-ms");
        check("--max-waiting-tokens 7", "--max-waiting-tokens");
        check("--waiting-served-ratio nan", "--waiting-served-ratio");
    }
}
