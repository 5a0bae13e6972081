//! What earlier runs found fastest, in a text file of one line each.
//!
//! cuBLASLt's algorithms are opaque words that mean something to one version of it only, so the
//! file's name says GPU, driver and cuBLASLt, and the revision of our own kernels. A file that
//! cannot be read or written is no error: tuning takes its place.

use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use inflight_kernels::ops::flat_gemm::Ring;

use super::{Method, Problem};
use crate::cuda::device::DeviceInfo;

/// Counts what changed the speed of our own kernels or how candidates are timed: earlier choices do
/// not hold then.
const REVISION: u32 = 8;
/// How a line names our own kernels.
const OURS: [(&str, Method); 5] = [
    ("gemv", Method::Gemv),
    ("flat-whole", Method::Flat(Ring::Whole)),
    ("flat-half", Method::Flat(Ring::Half)),
    ("hopper", Method::Hopper),
    ("gated", Method::Gated),
];
/// What comes before the algorithm of a product with expanded weights.
const EXPANDED: &str = "expanded ";
/// What comes before the number of parts and the algorithm of a product in parts.
const IN_PARTS: &str = "parts ";
/// Words of an algorithm.
const WORDS: usize = 8;

pub(in crate::cuda) struct MethodStore {
    path: Option<PathBuf>,
    /// By the problem's text.
    known: HashMap<String, Method>,
}

impl MethodStore {
    /// Of the folder `cache`, if there is one; it need not be one that can be written.
    pub(in crate::cuda) fn open(
        cache: Option<&Path>,
        device: &DeviceInfo,
        cublaslt_version: usize,
    ) -> Self {
        let keep = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let gpu: String = device.name.chars().map(keep).collect();
        let driver = device.driver_version;
        let name = format!("gemm-{gpu}-{driver}-{cublaslt_version}-{REVISION}.txt");
        let path = cache.map(|folder| folder.join(name));
        let text = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let known = text.iter().flat_map(|text| text.lines()).filter_map(parse).collect();
        Self { path, known }
    }

    /// What is put into it from now on is forgotten with it.
    pub(in crate::cuda) fn without_file(self) -> Self {
        Self { path: None, ..self }
    }

    pub(super) fn get(&self, problem: &Problem) -> Option<Method> {
        self.known.get(&problem.to_string()).copied()
    }

    /// Forgets a choice; what was written is replaced by the next one.
    pub(super) fn forget(&mut self, problem: &Problem) {
        self.known.remove(&problem.to_string());
    }

    /// Remembers a choice. One line is one write, so that two processes do not mix theirs.
    pub(super) fn put(&mut self, problem: Problem, method: Method) {
        self.known.insert(problem.to_string(), method);
        let Some(path) = &self.path else { return };
        let line = format!("{problem} {}\n", text(method));
        let file = path.parent().map_or(Ok(()), fs::create_dir_all);
        let file = file.and_then(|()| OpenOptions::new().create(true).append(true).open(path));
        if file.and_then(|mut file| file.write_all(line.as_bytes())).is_err() {
            self.path = None; // nowhere to write: do not try again
        }
    }
}

fn text(method: Method) -> String {
    let words =
        |algorithm: cublasLtMatmulAlgo_t| algorithm.data.map(|word| format!("{word:x}")).join(" ");
    match method {
        Method::Library(algorithm) => words(algorithm),
        Method::Expanded(algorithm) => format!("{EXPANDED}{}", words(algorithm)),
        Method::InParts { algorithm, num_parts } => {
            format!("{IN_PARTS}{num_parts} {}", words(algorithm))
        }
        Method::Gemv | Method::Flat(_) | Method::Hopper | Method::Gated => {
            let ours = OURS.iter().find(|(_, ours)| *ours == method);
            ours.map(|(name, _)| (*name).to_owned()).expect("every kernel of ours has a name")
        }
    }
}

/// A line's problem and method, if it is whole.
fn parse(line: &str) -> Option<(String, Method)> {
    let (problem, method) = line.split_once(' ')?;
    if let Some((_, ours)) = OURS.iter().find(|(name, _)| *name == method) {
        return Some((problem.to_owned(), *ours));
    }
    let method = if let Some(words) = method.strip_prefix(EXPANDED) {
        Method::Expanded(algorithm(words)?)
    } else if let Some(words) = method.strip_prefix(IN_PARTS) {
        let (num_parts, words) = words.split_once(' ')?;
        Method::InParts { algorithm: algorithm(words)?, num_parts: num_parts.parse().ok()? }
    } else {
        Method::Library(algorithm(method)?)
    };
    Some((problem.to_owned(), method))
}

fn algorithm(words: &str) -> Option<cublasLtMatmulAlgo_t> {
    let mut fields = words.split(' ');
    let mut data = [0; WORDS];
    for word in &mut data {
        *word = u64::from_str_radix(fields.next()?, 16).ok()?;
    }
    fields.next().is_none().then_some(cublasLtMatmulAlgo_t { data })
}

#[cfg(test)]
mod tests {
    use super::{
        super::problem::{NextKind, WeightKind},
        *,
    };

    fn device(name: &str) -> DeviceInfo {
        DeviceInfo {
            name: name.into(),
            compute_capability: (9, 0),
            num_sms: 132,
            max_shared_bytes: 232_448,
            shared_bytes_per_sm: 233_472,
            l2_bytes: 50 << 20,
            memory_bytes: 141 << 30,
            driver_version: 13000,
        }
    }

    fn problem(num_rows: usize) -> Problem {
        Problem {
            num_rows,
            n: 6144,
            k: 4096,
            bias: true,
            accumulate: false,
            f32_out: false,
            weights: WeightKind::Bf16,
            next: NextKind::Nothing,
        }
    }

    #[test]
    fn choices_outlive_the_process_and_damaged_lines_do_not_matter() {
        let folder = std::env::temp_dir().join(format!("inflight-gemm-{}", std::process::id()));
        let open = |name| MethodStore::open(Some(&folder), &device(name), 130_100);
        let words = cublasLtMatmulAlgo_t { data: [1, 2, 3, u64::MAX, 5, 6, 7, 8] };
        let algorithm = Method::Library(words);
        let fp8 = Problem { weights: WeightKind::Fp8Blocks, ..problem(64) };
        let mut store = open("NVIDIA H200");
        store.put(problem(8), algorithm);
        store.put(problem(1), Method::Gemv);
        store.put(problem(32), Method::Flat(Ring::Half));
        store.put(problem(128), Method::Gated);
        store.put(fp8, Method::Expanded(words));
        store.put(problem(256), Method::InParts { algorithm: words, num_parts: 4 });
        let path = folder.join(format!("gemm-NVIDIA-H200-13000-130100-{REVISION}.txt"));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "8x6144x4096+bias 1 2 3 ffffffffffffffff 5 6 7 8\n1x6144x4096+bias gemv\n\
             32x6144x4096+bias flat-half\n128x6144x4096+bias gated\n\
             64x6144x4096+bias+fp8blocks expanded 1 2 3 ffffffffffffffff 5 6 7 8\n\
             256x6144x4096+bias parts 4 1 2 3 ffffffffffffffff 5 6 7 8\n"
        );
        let damaged =
            "16x6144x4096+bias 1 2 zz\n\n16x6144x4096+bias parts x 1\n9 1 2 3 4 5 6 7 8 9\n";
        fs::write(&path, format!("{text}{damaged}")).unwrap();
        assert_eq!(open("NVIDIA H200").get(&problem(8)), Some(algorithm));
        assert_eq!(open("NVIDIA H200").get(&problem(1)), Some(Method::Gemv));
        assert_eq!(open("NVIDIA H200").get(&problem(32)), Some(Method::Flat(Ring::Half)));
        assert_eq!(open("NVIDIA H200").get(&problem(128)), Some(Method::Gated));
        assert_eq!(open("NVIDIA H200").get(&fp8), Some(Method::Expanded(words)));
        let mut without_file = open("NVIDIA H200").without_file();
        without_file.put(problem(16), Method::Gemv);
        assert_eq!(without_file.get(&problem(8)), Some(algorithm));
        assert_eq!(without_file.get(&problem(16)), Some(Method::Gemv));
        let in_parts = Method::InParts { algorithm: words, num_parts: 4 };
        assert_eq!(open("NVIDIA H200").get(&problem(256)), Some(in_parts));
        assert_eq!(open("NVIDIA H200").get(&problem(16)), None);
        assert_eq!(open("NVIDIA H100").get(&problem(8)), None);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_store_that_cannot_be_written_still_remembers() {
        let mut store = MethodStore::open(Some(Path::new("/dev/null/x")), &device("GPU"), 1);
        let algorithm = Method::Library(cublasLtMatmulAlgo_t { data: [7; WORDS] });
        store.put(problem(1), algorithm);
        assert_eq!(store.get(&problem(1)), Some(algorithm));
        assert!(store.path.is_none());
    }
}
