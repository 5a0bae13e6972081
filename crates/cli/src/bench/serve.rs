//! `inflight bench serve`: any OpenAI-compatible server under load.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use inflight_bench::client::Client;
use inflight_bench::plot::{Line, Lines, Plot, Sheet};
use inflight_bench::serve::{
    Arrivals, Endpoint, Load, LoadFigures, LoadLengths, LoadProgress, Pace, PlannedRequest,
    PromptKind, Quantiles, ServeWorkload, run_load,
};
use serde_json::{Value, json};

use super::outputs::Outputs;
use crate::args::{ArrivalsChoice, EndpointChoice, PromptChoice, ServeLoadArgs};
use crate::progress::is_watched;

/// How often a server that is not there yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// A client that is busier than this is said to be.
const BUSY_CLIENT: f64 = 0.7;

pub(super) fn bench_serve(args: &ServeLoadArgs) -> Result<()> {
    let endpoint = match args.endpoint {
        EndpointChoice::Completions => Endpoint::Completions,
        EndpointChoice::Chat => Endpoint::Chat,
    };
    let is_ids = args.prompts == PromptChoice::Ids;
    ensure!(endpoint == Endpoint::Completions || !is_ids, "--prompts ids: not for chat");
    let client = Client::new(args.url.clone(), args.api_key.as_deref()).context("--api-key")?;
    let client = Arc::new(client.keeping_alive(!args.no_keepalive));
    let lengths = lengths(args)?;
    let outputs = Outputs::create(&args.files)?;
    let model = model(&client, args)?;
    let experiment = Experiment { args, client, endpoint, lengths, model };
    let runs = experiment.run_all()?;
    outputs.write(|| experiment.as_json(&runs), || experiment.sheet(&runs))?;
    let num_failed: usize = runs.iter().map(|run| run.num_requests - run.num_ok).sum();
    ensure!(num_failed == 0, "{num_failed} requests failed or ended otherwise than they should");
    Ok(())
}

fn lengths(args: &ServeLoadArgs) -> Result<LoadLengths> {
    let Some(path) = &args.lengths else {
        return Ok(LoadLengths::Drawn { input: args.input_len, output: args.output_len });
    };
    let named = || format!("--lengths {}", path.display());
    let text = fs::read(path).with_context(named)?;
    LoadLengths::from_json(&text).map_err(|reason| anyhow!("{}: {reason}", named()))
}

/// The model's name, asked for if need be; waits for the server first if told to.
fn model(client: &Client, args: &ServeLoadArgs) -> Result<String> {
    if let (Some(model), 0) = (&args.model, args.wait_ready) {
        return Ok(model.clone());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let until = Instant::now() + Duration::from_secs(args.wait_ready);
    runtime.block_on(async {
        loop {
            let answer = match client.get("/v1/models").await {
                Err(_) if Instant::now() < until => {
                    tokio::time::sleep(ASK_AGAIN).await;
                    continue;
                }
                answer => answer,
            };
            return match (&args.model, answer) {
                // Some servers have no list of models; whoever names one needs none.
                (Some(model), _) => Ok(model.clone()),
                (None, Err(error)) => Err(error).context("--model: asking for /v1/models"),
                (None, Ok(list)) => {
                    let list: Value = serde_json::from_slice(&list).context("/v1/models")?;
                    let first = list["data"][0]["id"].as_str();
                    first.map(str::to_owned).context("/v1/models names no model: give --model")
                }
            };
        }
    })
}

struct Experiment<'a> {
    args: &'a ServeLoadArgs,
    client: Arc<Client>,
    endpoint: Endpoint,
    lengths: LoadLengths,
    model: String,
}

impl Experiment<'_> {
    fn run_all(&self) -> Result<Vec<LoadFigures>> {
        println!("{} at {}", self.model, self.client.address());
        println!(
            "{:>14} {:>9} {:>8} {:>9} {:>24} {:>24} {:>8} {:>8}",
            "load",
            "ok",
            "req/s",
            "tok/s",
            "TTFT p50 p90 p99 ms",
            "ITL p50 p90 p99 ms",
            "TPOT ms",
            "E2E s"
        );
        let mut runs: Vec<LoadFigures> = Vec::new();
        for pace in self.paces() {
            self.warm_up(pace)?;
            for _ in 0..self.args.repeats.get() {
                let workload = self.workload(self.num_requests(pace));
                let requests = workload.plan(runs.len() as u64);
                let requests = requests.map_err(|reason| anyhow!("--num-prompts: {reason}"))?;
                let figures = self.run(pace, requests, runs.len() as u64)?;
                print_row(&figures);
                runs.push(figures);
            }
        }
        let is_lost = runs.iter().all(|run| run.num_ok == 0);
        match runs.iter().flat_map(|run| &run.failure_samples).next() {
            Some(sample) if is_lost => bail!("no request succeeded: {sample}"),
            _ => Ok(runs),
        }
    }

    fn paces(&self) -> Vec<Pace> {
        let args = self.args;
        let arrivals = match args.arrivals {
            ArrivalsChoice::Poisson => Arrivals::Poisson,
            ArrivalsChoice::Constant => Arrivals::Constant,
        };
        match (&args.rate[..], &args.concurrency[..]) {
            ([], []) => vec![Pace::Closed(1)],
            ([], concurrency) => concurrency.iter().map(|n| Pace::Closed(n.get())).collect(),
            (rates, _) => rates.iter().map(|rate| Pace::Open(*rate, arrivals)).collect(),
        }
    }

    fn num_requests(&self, pace: Pace) -> usize {
        let usual = match pace {
            Pace::Closed(concurrency) => concurrency.saturating_mul(4).max(16),
            Pace::Open(rate, _) => (rate * 10.0).ceil() as usize,
        };
        self.args.num_prompts.map_or(usual, |num_prompts| num_prompts.get())
    }

    fn workload(&self, num_requests: usize) -> ServeWorkload {
        let args = self.args;
        let (low, high) = args.id_range;
        ServeWorkload {
            endpoint: self.endpoint,
            model: self.model.clone(),
            num_requests,
            lengths: self.lengths.clone(),
            prompts: match args.prompts {
                PromptChoice::Text => PromptKind::Text,
                PromptChoice::Ids => PromptKind::Ids(low, high),
            },
            shared_prefix: args.shared_prefix,
            temperature: args.temperature,
            ignores_eos: args.ignore_eos,
            asks_usage: !args.no_usage,
            extra: args.extra_body.clone().unwrap_or_default(),
            seed: args.seed,
        }
    }

    fn warm_up(&self, pace: Pace) -> Result<()> {
        if self.args.warm_up == 0 {
            return Ok(());
        }
        let at_once = match pace {
            Pace::Closed(concurrency) => concurrency,
            Pace::Open(..) => self.args.warm_up,
        };
        // Prompts that no run has.
        let requests = self.workload(self.args.warm_up).plan(u64::MAX / 2);
        let requests = requests.map_err(|reason| anyhow!("--warm-up: {reason}"))?;
        self.load(Pace::Closed(at_once), requests, 0, &mut |_| ()).map(|_| ())
    }

    fn run(&self, pace: Pace, requests: Vec<PlannedRequest>, run: u64) -> Result<LoadFigures> {
        let bar = is_watched(self.args.no_progress).then(|| {
            let style = "requests {bar:40} {pos}/{len} {msg} {elapsed}";
            let style = ProgressStyle::with_template(style).expect("the template is valid");
            ProgressBar::new(requests.len() as u64).with_style(style)
        });
        let started = Instant::now();
        let mut show = |progress: &LoadProgress| {
            let Some(bar) = &bar else { return };
            bar.set_position(progress.num_ended.load(Relaxed) as u64);
            let rate = progress.num_pieces.load(Relaxed) as f64 / started.elapsed().as_secs_f64();
            let num_failed = progress.num_failed.load(Relaxed);
            bar.set_message(format!("{rate:.0} tok/s, {num_failed} failed"));
        };
        let figures = self.load(pace, requests, run, &mut show)?;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        Ok(figures)
    }

    fn load(
        &self,
        pace: Pace,
        requests: Vec<PlannedRequest>,
        run: u64,
        show: &mut dyn FnMut(&LoadProgress),
    ) -> Result<LoadFigures> {
        let load = Load {
            client: &self.client,
            endpoint: self.endpoint,
            requests,
            pace,
            max_in_flight: self.args.max_in_flight.get(),
            timeout: Duration::from_secs(self.args.timeout),
            is_exact: self.args.ignore_eos,
            seed: self.args.seed.wrapping_add(run),
        };
        Ok(LoadFigures::new(&run_load(load, show)?, self.args.goodput))
    }

    fn as_json(&self, runs: &[LoadFigures]) -> Result<Value> {
        let args = self.args;
        Ok(json!({
            "bench": "serve",
            "version": env!("CARGO_PKG_VERSION"),
            "url": self.client.address().to_string(),
            "model": self.model,
            "endpoint": self.endpoint.path(),
            "workload": {
                "input_len": args.lengths.is_none().then(|| format!("{:?}", args.input_len)),
                "output_len": args.lengths.is_none().then(|| format!("{:?}", args.output_len)),
                "lengths": args.lengths,
                "prompts": format!("{:?}", args.prompts).to_lowercase(),
                "shared_prefix": args.shared_prefix,
                "ignore_eos": args.ignore_eos,
                "temperature": args.temperature,
                "extra_body": args.extra_body,
                "keepalive": !args.no_keepalive,
                "seed": args.seed,
            },
            "runs": serde_json::to_value(runs)?,
        }))
    }

    fn sheet(&self, runs: &[LoadFigures]) -> Sheet {
        let (is_rate, x_label) = match self.args.rate[..] {
            [] => (false, "requests at once"),
            _ => (true, "requests a second"),
        };
        let x =
            |run: &LoadFigures| run.rate.or(run.concurrency.map(|n| n as f64)).unwrap_or_default();
        let line = |name: &str, y: &dyn Fn(&LoadFigures) -> Option<f64>| Line {
            name: name.to_owned(),
            points: runs.iter().filter_map(|run| Some((x(run), y(run)?))).collect(),
        };
        let panel = |title: &str, y_label: &str, lines| {
            let (title, y_label) = (title.to_owned(), y_label.to_owned());
            let (x_label, is_x_log) = (x_label.to_owned(), !is_rate);
            Plot::Lines(Lines { title, x_label, y_label, is_x_log, lines })
        };
        let quantiles = |title: &str, of: &dyn Fn(&LoadFigures) -> Option<Quantiles>| {
            let lines = vec![
                line("p50", &|run| Some(of(run)?.p50)),
                line("p90", &|run| Some(of(run)?.p90)),
                line("p99", &|run| Some(of(run)?.p99)),
            ];
            panel(title, "ms", lines)
        };
        let mut served = vec![line("served", &|run| Some(run.requests_per_s))];
        if self.args.goodput.is_some() {
            let good = |run: &LoadFigures| Some(run.goodput.as_ref()?.requests_per_s);
            served.push(line("within the targets", &good));
        }
        Sheet {
            heading: format!("{} under load", self.model),
            note: format!("inflight bench serve, {}", self.client.address()),
            plots: vec![
                panel("Output", "tok/s", vec![line("", &|run| Some(run.output_tokens_per_s))]),
                panel("Requests", "1/s", served),
                quantiles("Time to the first text", &|run| run.ttft_ms.clone()),
                quantiles("Time between two pieces of text", &|run| run.itl_ms.clone()),
            ],
        }
    }
}

fn print_row(run: &LoadFigures) {
    let three = |quantiles: &Option<Quantiles>| match quantiles {
        Some(q) => format!("{:.1} {:.1} {:.1}", q.p50, q.p90, q.p99),
        None => "-".to_owned(),
    };
    let p50 = |quantiles: &Option<Quantiles>| quantiles.as_ref().map_or(f64::NAN, |q| q.p50);
    println!(
        "{:>14} {:>9} {:8.2} {:9.1} {:>24} {:>24} {:8.2} {:8.2}",
        run.load(),
        format!("{}/{}", run.num_ok, run.num_requests),
        run.requests_per_s,
        run.output_tokens_per_s,
        three(&run.ttft_ms),
        three(&run.itl_ms),
        p50(&run.tpot_ms),
        p50(&run.e2e_ms) / 1e3
    );
    if let Some(goodput) = &run.goodput {
        let (rate, share) = (goodput.requests_per_s, goodput.fraction * 100.0);
        println!("{:>14} within the targets: {rate:.2} req/s, {share:.1} % of all", "");
    }
    if !run.is_counted_by_server && run.num_ok > 0 {
        println!("{:>14} the server counts no tokens: pieces of text are counted", "");
    }
    for (kind, count) in &run.failures {
        println!("{:>14} {count} failed: {kind}", "");
    }
    for sample in &run.failure_samples {
        println!("{:>16} {sample}", "");
    }
    match run.client_core_fraction {
        Some(share) if share > BUSY_CLIENT => {
            println!("{:>14} this client took {:.0} % of a core", "", share * 100.0);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCommand, Cli, Command};

    fn parse(flags: &[&str]) -> Result<ServeLoadArgs, clap::Error> {
        let arguments = ["inflight", "bench", "serve"].iter().chain(flags);
        let Command::Bench(bench) = Cli::try_parse_from(arguments)?.command else { panic!() };
        let BenchCommand::Serve(args) = bench.command else { panic!("serve") };
        Ok(*args)
    }

    #[test]
    fn wrong_flags_are_named() {
        let check = |flags: &[&str], named: &str| {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains(named), "{flags:?}: {error}");
        };
        check(&["--url", "https://h"], "https");
        check(&["--rate", "1", "--concurrency", "2"], "--concurrency");
        check(&["--rate", "0"], "--rate");
        check(&["--input-len", "9:3"], "9 is over 3");
        check(&["--lengths", "f", "--input-len", "9"], "--input-len");
        check(&["--goodput", "itl:5"], "itl");
        check(&["--id-range", "5"], "LOW:HIGH");
        check(&["--extra-body", "[]"], "--extra-body");
        let args = parse(&["--endpoint", "chat", "--prompts", "ids"]).unwrap();
        assert!(bench_serve(&args).unwrap_err().to_string().contains("--prompts ids"));
        let args = parse(&["--lengths", "/no/such"]).unwrap();
        assert!(bench_serve(&args).unwrap_err().to_string().contains("--lengths /no/such"));
    }

    #[test]
    fn a_server_that_is_not_there_is_said_to_be() {
        // Nobody listens on port 9 of this machine.
        let args = parse(&["--url", "http://127.0.0.1:9"]).unwrap();
        let error = format!("{:#}", bench_serve(&args).unwrap_err());
        assert!(error.contains("cannot connect to http://127.0.0.1:9"), "{error}");
    }
}
