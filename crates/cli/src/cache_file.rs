//! A file for cold prefixes, and what its blocks depend on.

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use inflight_backend::CpuConfig;
use inflight_engine::{CacheFileOptions, EngineConfig};

use crate::args::EngineArgs;
use crate::assembly::Model;

/// Bytes at both ends of a file of weights that tell it apart.
const SAMPLED_BYTES: u64 = 1 << 20;

/// What `--cache-file` asks for, on a CPU.
pub(crate) fn resolve_cache_file(
    args: &EngineArgs,
    model: &Model<'_>,
    cpu: &CpuConfig,
    engine: &EngineConfig,
) -> Result<Option<CacheFileOptions>> {
    let Some(path) = &args.memory.cache_file else { return Ok(None) };
    ensure!(
        engine.memory.keeps_cold_prefixes,
        "--cache-file needs --host-cache: blocks go to the file and come back by the host's memory"
    );
    let gib = args.memory.cache_file_size;
    ensure!(gib > 0.0 && gib < 2_f64.powi(30), "--cache-file-size is {gib}; it must be over 0");
    let weights = model.path.context("--cache-file is for serve, run and chat")?;
    let mut content = fingerprint(weights)?;
    let CpuConfig { kv_dtype, weights, simd, .. } = cpu;
    // Writing to a string does not fail.
    let _ = write!(
        content,
        "load {:?} {}, quantization {:?}, weights {weights:?}, {simd:?}, KV {kv_dtype}, block {}",
        args.load_format, args.seed, args.quantization, engine.block_size
    );
    let max_bytes = (gib * f64::from(1 << 30)) as u64;
    Ok(Some(CacheFileOptions { path: path.clone(), max_bytes, content }))
}

/// What tells a model's files apart: lengths, and samples of their bytes.
fn fingerprint(model: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = if model.is_dir() {
        let entries = fs::read_dir(model)?.collect::<Result<Vec<_>, _>>()?;
        entries.into_iter().map(|entry| entry.path()).collect()
    } else {
        vec![model.to_owned()]
    };
    let is_weights_or_config = |path: &PathBuf| {
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".gguf")
    };
    files.retain(is_weights_or_config);
    files.sort_unstable();
    let mut text = String::new();
    for path in files {
        let (length, first, last) = sample(&path).with_context(|| path.display().to_string())?;
        let _ = writeln!(text, "{length} bytes, {first:08x} {last:08x}");
    }
    Ok(text)
}

/// A file's length, and checksums of its first and last bytes.
fn sample(path: &Path) -> Result<(u64, u32, u32)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut checksum = |start: u64| -> Result<u32> {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(start))?;
        (&mut file).take(SAMPLED_BYTES).read_to_end(&mut bytes)?;
        Ok(crc32fast::hash(&bytes))
    };
    Ok((length, checksum(0)?, checksum(length.saturating_sub(SAMPLED_BYTES))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_have_other_fingerprints() {
        let folder = std::env::temp_dir().join(format!("inflight-print-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let of = |name: &str, bytes: &[u8]| {
            fs::write(folder.join(name), bytes).unwrap();
            fingerprint(&folder).unwrap()
        };
        let first = of("a.safetensors", b"weights");
        assert_eq!(of("README.md", b"words"), first);
        let changed = of("a.safetensors", b"weighty");
        assert_ne!(changed, first);
        assert_ne!(of("config.json", b"{}"), changed);
        fs::remove_dir_all(&folder).unwrap();
        assert!(fingerprint(&folder.join("gone.gguf")).is_err());
    }
}
