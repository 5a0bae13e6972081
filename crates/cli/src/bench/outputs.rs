//! Where figures go besides the terminal.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use inflight_bench::plot::Sheet;
use serde_json::Value;

use crate::args::FigureFiles;

/// Files that were created before anything was measured: a wrong path should not cost the run.
pub(super) struct Outputs {
    json: Option<BufWriter<File>>,
    plot: Option<BufWriter<File>>,
}

impl Outputs {
    pub(super) fn create(files: &FigureFiles) -> Result<Self> {
        let open =
            |flag, path: &Option<_>| path.as_deref().map(|path| create(flag, path)).transpose();
        Ok(Self { json: open("--json", &files.json)?, plot: open("--plot", &files.plot)? })
    }

    /// Writes what was asked for.
    pub(super) fn write(
        self,
        figures: impl FnOnce() -> Result<Value>,
        sheet: impl FnOnce() -> Sheet,
    ) -> Result<()> {
        if let Some(mut file) = self.json {
            let figures = figures()?;
            writeln!(file, "{figures:#}").and_then(|()| file.flush()).context("--json")?;
        }
        if let Some(file) = self.plot {
            sheet().write_svg(file).context("--plot")?;
        }
        Ok(())
    }
}

pub(crate) fn create(flag: &str, path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path).with_context(|| format!("{flag} {}", path.display()))?;
    Ok(BufWriter::new(file))
}
