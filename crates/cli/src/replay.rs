//! `inflight replay`: does again what an engine's scheduler decided.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use inflight_engine::{OnFailure, Record, Replay, ReplayedStep};

use crate::args::ReplayArgs;

pub(crate) fn replay(args: &ReplayArgs) -> Result<()> {
    let named = || format!("FILE {}", args.file.display());
    let file = File::open(&args.file).with_context(named)?;
    let record: Record = serde_json::from_reader(BufReader::new(file)).with_context(named)?;
    let mut replay = Replay::new(&record).with_context(named)?;
    let mut out = std::io::stdout().lock();
    let mut told = Told::default();
    writeln!(out, "  plan     seconds  tokens  single  chunks  joined  gave way  run  wait  free")?;
    loop {
        // What made the engine panic does so here, too.
        let stepped = catch_unwind(AssertUnwindSafe(|| replay.step()));
        let Ok(step) = stepped else {
            told.check_same()?;
            bail!("plan {} panics, as above: the failure is reproduced", told.num_plans + 1)
        };
        if step.is_err() {
            told.check_same()?;
        }
        let Some(step) = step.with_context(named)? else { break };
        told.num_plans += 1;
        let is_shown = args.all || told.num_plans > args.first;
        let is_odd = !step.is_same() || step.violation.is_some();
        if is_odd || (is_shown && (args.all || told.num_plans <= args.first + args.num_plans)) {
            write_step(&mut out, told.num_plans, &step)?;
        }
        told.num_different += usize::from(!step.is_same());
        if let Some(violation) = step.violation {
            told.check_same()?;
            bail!("after plan {}: {violation}", told.num_plans);
        }
    }
    let num_plans = told.num_plans;
    if !record.is_whole {
        writeln!(
            out,
            "{num_plans} plans, not done again: the record does not go back to the start"
        )?;
        return Ok(());
    }
    told.check_same()?;
    writeln!(out, "{num_plans} plans, all decided again as before")?;
    Ok(())
}

#[derive(Default)]
struct Told {
    num_plans: usize,
    num_different: usize,
}

impl Told {
    /// Fails if any plan was another. What the engine was told after it does not fit what is
    /// decided now, so nothing that goes wrong then says anything about the record.
    fn check_same(&self) -> Result<()> {
        let Self { num_plans, num_different } = self;
        ensure!(
            *num_different == 0,
            "{num_different} of {num_plans} plans are decided otherwise now"
        );
        Ok(())
    }
}

fn write_step(out: &mut impl Write, number: usize, step: &ReplayedStep) -> Result<()> {
    let planned = step.replayed.unwrap_or(step.recorded);
    let mark = if step.is_same() { ' ' } else { '!' };
    let [running, waiting, free] = step.state;
    writeln!(
        out,
        "{mark}{number:>5}{:>12.6}{:>8}{:>8}{:>8}{:>8}{:>10}{running:>5}{waiting:>6}{free:>6}",
        step.now.as_secs_f64(),
        planned.num_tokens,
        planned.num_single,
        planned.num_chunks,
        planned.num_admitted,
        planned.num_preempted,
    )?;
    if !step.is_same() {
        writeln!(out, "       was: {:?}", step.recorded)?;
    }
    Ok(())
}

/// Writes the record of an engine that fails to a new file and says where it is.
pub(crate) fn keep_record_of_failure() -> OnFailure {
    Box::new(|record| match write_record(&std::env::temp_dir(), &record) {
        Ok(path) => {
            let path = path.display();
            tracing::error!(%path, "what the scheduler decided is kept; see `inflight replay`");
        }
        Err(error) => tracing::error!("what the scheduler decided cannot be kept: {error:#}"),
    })
}

fn write_record(folder: &Path, record: &Record) -> Result<PathBuf> {
    let process = std::process::id();
    for number in 0..1000 {
        let path = folder.join(format!("inflight-replay-{process}-{number}.json"));
        match File::create_new(&path) {
            Ok(file) => {
                let mut file = BufWriter::new(file);
                serde_json::to_writer(&mut file, record)?;
                file.flush()?;
                return Ok(path);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        }
    }
    bail!("{} is full of records", folder.display())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use inflight_sim::check::{Plants, Scenario, run_with};

    use super::*;

    /// A record of the simulated run of `seed`.
    fn record(seed: u64) -> Record {
        let mut record = None;
        let plants = Plants { record: Some(&mut record), ..Plants::default() };
        run_with(&Scenario::new(seed), plants).unwrap();
        record.unwrap()
    }

    #[test]
    fn a_failure_leaves_a_file_that_can_be_replayed() {
        let folder =
            std::env::temp_dir().join(format!("inflight-replay-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let paths = [(); 2].map(|()| write_record(&folder, &record(3)).unwrap());
        assert_ne!(paths[0], paths[1]);
        let args = ReplayArgs { file: paths[0].clone(), first: 0, num_plans: 1, all: false };
        replay(&args).unwrap();
        // Another program's decisions are found to be others; not every run has two at once.
        let is_found = (0..20).any(|seed| {
            let mut other = record(seed);
            other.config.max_num_seqs = 1;
            let file = write_record(&folder, &other).unwrap();
            let replayed = replay(&ReplayArgs { file, ..args });
            replayed.is_err_and(|error| error.to_string().contains("are decided otherwise now"))
        });
        assert!(is_found);
        fs::remove_dir_all(&folder).unwrap();
    }
}
