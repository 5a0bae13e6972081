//! `inflight trace`: the last steps of a server, or those of a short load, as a picture.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use inflight_bench::client::{Client, ServerAddress};
use inflight_engine::StepRecord;
use inflight_observe::{Panel, read_timeline, write_picture};
use serde_json::Value;

use crate::args::{BenchCommand, Cli, Command, TraceArgs};
use crate::bench::bench;

/// A load that takes a moment on a CPU, and whose steps fit a picture.
const SHORT_LOAD: [&str; 6] = ["--num-prompts", "8", "--input-len", "32", "--output-len", "48"];
/// Where the picture goes if nobody says.
const USUAL_PICTURE: &str = "timeline.html";

pub(crate) fn trace(args: &TraceArgs) -> Result<()> {
    if args.run.is_some() || args.config.is_some() {
        return run_load(args);
    }
    if let Some(request) = &args.request {
        let [source] = &args.sources[..] else { bail!("--request: give one server") };
        let told = get(args, source, &format!("/debug/requests/{}", plain(request)?))?;
        print!("{}", request_text(&serde_json::from_slice(&told)?));
        return Ok(());
    }
    ensure!(
        args.json.is_none() || args.sources.len() == 1,
        "--json: files are timelines already; give one server"
    );
    let mut timelines = Vec::new();
    for source in &args.sources {
        let text = if Path::new(source).is_file() {
            fs::read(source).with_context(|| source.clone())?
        } else {
            get(args, source, &format!("/debug/timeline?seconds={}", args.seconds))?
        };
        if let Some(path) = &args.json {
            fs::write(path, &text).with_context(|| format!("--json {}", path.display()))?;
        }
        let steps = read_timeline(&text).map_err(|reason| anyhow!("{source} {reason}"))?;
        timelines.push((source.clone(), steps));
    }
    if args.picture.is_some() || args.json.is_none() {
        draw(&picture_path(args), &timelines)?;
    }
    Ok(())
}

fn picture_path(args: &TraceArgs) -> PathBuf {
    args.picture.clone().unwrap_or_else(|| USUAL_PICTURE.into())
}

fn draw(path: &Path, timelines: &[(String, Vec<StepRecord>)]) -> Result<()> {
    let panels: Vec<_> = timelines.iter().map(|(title, steps)| Panel { title, steps }).collect();
    let named = || format!("--picture {}", path.display());
    let mut file = fs::File::create(path).with_context(named)?;
    write_picture(&mut file, "Inflight: steps", &panels).with_context(named)?;
    file.flush().with_context(named)?;
    for (title, steps) in timelines {
        eprintln!("{title}: {} steps, drawn in {}", steps.len(), path.display());
    }
    Ok(())
}

/// Has `bench async` run and draw a short load.
fn run_load(args: &TraceArgs) -> Result<()> {
    let mut arguments = vec!["inflight".to_owned(), "bench".to_owned(), "async".to_owned()];
    arguments.extend(args.run.clone());
    if let Some(config) = args.config {
        arguments.extend(["--config".to_owned(), config.name().to_owned()]);
    }
    arguments.extend(SHORT_LOAD.map(str::to_owned));
    let mut file = |flag: &str, path: PathBuf| -> Result<()> {
        let path = path.into_os_string().into_string();
        let path = path.map_err(|path| anyhow!("{flag} {} is no text", path.display()))?;
        arguments.extend([flag.to_owned(), path]);
        Ok(())
    };
    if args.picture.is_some() || args.json.is_none() {
        file("--picture", picture_path(args))?;
    }
    if let Some(path) = &args.json {
        file("--trace", path.clone())?;
    }
    let parsed = Cli::try_parse_from(arguments)?.command;
    let Command::Bench(parsed) = parsed else { unreachable!("the arguments say bench") };
    debug_assert!(matches!(parsed.command, BenchCommand::Async(_)));
    bench(&parsed.command)
}

/// What a server answers.
fn get(args: &TraceArgs, server: &str, path: &str) -> Result<Vec<u8>> {
    let address: ServerAddress = server.parse().map_err(|reason| {
        anyhow!("{server} is neither a file nor the address of a server: {reason}")
    })?;
    let client = Client::new(address, args.api_key.as_deref()).context("--api-key")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(client.get(path))?.to_vec())
}

/// A name that can stand in a path as it is.
fn plain(name: &str) -> Result<&str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    ensure!(!name.is_empty() && name.bytes().all(is_plain), "--request: `{name}` is no id");
    Ok(name)
}

/// A request's stages, one a line; times are since it was accepted.
fn request_text(told: &Value) -> String {
    let mut text = format!("{} {}\n", told["path"].as_str().unwrap_or(""), told["id"]);
    for sequence in told["sequences"].as_array().into_iter().flatten() {
        text += &format!(
            "sequence {}: {} prompt tokens, {} of them cached, {} generated, {}\n",
            sequence["engine_id"],
            sequence["prompt_tokens"],
            sequence["cached_tokens"],
            sequence["generated_tokens"],
            sequence["ending"].as_str().unwrap_or("running")
        );
        text += &stages_text(&sequence["timeline"]);
    }
    text
}

fn stages_text(timeline: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let origin = number(&timeline["queue"]["start_us"]);
    let line = |from: &Value, to: &Value, what: String| {
        let (from, to) = (number(from) - origin, number(to) - origin);
        let length = (to - from) / 1e3;
        (from, format!("  {:10.3} ms {length:10.3} ms  {what}\n", from / 1e3))
    };
    let span = |span: &Value, what: &str| line(&span["start_us"], &span["end_us"], what.to_owned());
    let mut lines = vec![];
    if timeline["queue"].is_object() {
        lines.push(span(&timeline["queue"], "queue"));
    }
    for absence in timeline["absences"].as_array().into_iter().flatten() {
        lines.push(span(absence, "gave way to others"));
    }
    for stretch in timeline["stretches"].as_array().into_iter().flatten() {
        let again = if stretch["after_preemption"] == true { " again" } else { "" };
        let what = format!(
            "{}{again}: {} tokens in {} steps, batches {} to {}",
            stretch["kind"].as_str().unwrap_or(""),
            stretch["tokens"],
            stretch["steps"],
            stretch["first_batch"],
            stretch["last_batch"]
        );
        lines.push(line(&stretch["compute"]["start_us"], &stretch["compute"]["end_us"], what));
    }
    lines.sort_by(|a, b| a.0.total_cmp(&b.0));
    lines.into_iter().map(|(_, line)| line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stages_come_in_order_with_their_lengths() {
        let span = |start: f64, end: f64| json!({"start_us": start, "end_us": end});
        let stretch = |kind: &str, at: f64, again: bool| {
            json!({"kind": kind, "tokens": 9, "steps": 3, "first_batch": 4, "last_batch": 6,
                "after_preemption": again, "compute": span(at, at + 500.0)})
        };
        let timeline = json!({
            "queue": span(1000.0, 3000.0),
            "absences": [span(4000.0, 9000.0)],
            "stretches": [stretch("prefill", 3100.0, false), stretch("prefill", 9100.0, true)],
        });
        let text = stages_text(&timeline);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<_> = text.lines().map(words).collect();
        assert_eq!(lines[0], ["0.000", "ms", "2.000", "ms", "queue"]);
        assert_eq!(lines[1][..5], ["2.100", "ms", "0.500", "ms", "prefill:"]);
        assert_eq!(lines[2][..3], ["3.000", "ms", "5.000"]);
        assert_eq!(lines[3][4..6], ["prefill", "again:"]);
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        assert!(plain("chatcmpl-0a.b:c_d").is_ok());
        for wrong in ["", "a/b", "a b", "a?b", "é"] {
            assert!(plain(wrong).is_err(), "{wrong}");
        }
    }
}
