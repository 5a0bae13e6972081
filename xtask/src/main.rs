//! Project chores, in Rust so that they run wherever the project builds: `cargo xtask tidy`.
//!
//! Invariant: no room depends on this crate, and it depends on none.

use std::process::ExitCode;

mod tidy;

const USAGE: &str = "\
usage: cargo xtask <chore>

chores:
  tidy    check what rustc and clippy do not: lengths, leftovers, dead files, arrows between rooms
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => run_tidy(),
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run_tidy() -> ExitCode {
    match tidy::check(tidy::project_root()) {
        Ok(violations) if violations.is_empty() => ExitCode::SUCCESS,
        Ok(violations) => {
            for violation in &violations {
                eprintln!("{violation}");
            }
            eprintln!("tidy: {} to fix", violations.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("tidy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
