//! A kernel compiled by the host's C++ compiler, and launched on host memory.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_char, c_void},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, Mutex, Once, OnceLock, PoisonError},
};

use inflight_kernels::{Arch, Kernel, KernelSpec};

use crate::translate::{head, translate};

/// The emulator's C++: `launch.h` includes the others.
const HEADERS: [(&str, &str); 11] = [
    ("language.h", include_str!("cuda/language.h")),
    ("numbers.h", include_str!("cuda/numbers.h")),
    ("thread.h", include_str!("cuda/thread.h")),
    ("block.h", include_str!("cuda/block.h")),
    ("warp.h", include_str!("cuda/warp.h")),
    ("ptx.h", include_str!("cuda/ptx.h")),
    ("barriers.h", include_str!("cuda/barriers.h")),
    ("bulk.h", include_str!("cuda/bulk.h")),
    ("warpgroup.h", include_str!("cuda/warpgroup.h")),
    ("schedule.h", include_str!("cuda/schedule.h")),
    ("launch.h", include_str!("cuda/launch.h")),
];

/// In which order blocks and threads run; no result may depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    InTurn,
    /// By a seed, some blocks at a time.
    Shuffled(u32),
}

/// Orders that differ in all.
pub(crate) const ORDERS: [Order; 3] = [Order::InTurn, Order::Shuffled(1), Order::Shuffled(2)];

/// A specialisation of a kernel that runs on the host.
pub(crate) struct Emulated<K> {
    pub(crate) kernel: K,
    program: &'static Program,
}

impl<K: Kernel> Emulated<K> {
    /// Compiles the kernel, or finds what an earlier run has compiled. `None`, and a line that says
    /// so, where there is no C++ compiler.
    pub(crate) fn new(kernel: K, arch: Arch) -> Option<Self> {
        let spec = kernel.spec();
        let program = Program::of(&spec, arch)?;
        // SAFETY: `launch.h` defines it so.
        let params_bytes: extern "C" fn() -> u32 =
            unsafe { std::mem::transmute(program.function(c"emulated_params_bytes")) };
        assert_eq!(params_bytes() as usize, size_of::<K::Params>(), "parameters of {spec}");
        Some(Self { kernel, program })
    }

    /// Runs the whole grid.
    ///
    /// # Safety
    /// Addresses in `params` are of host memory that is as large, and as initialised, as the kernel
    /// needs; nothing else touches it meanwhile.
    ///
    /// # Errors
    /// What the emulator says of a kernel that cannot go on.
    pub(crate) unsafe fn try_launch(&self, params: &K::Params, order: Order) -> Result<(), String> {
        let launch = self.kernel.launch(params);
        if launch.is_empty() {
            return Ok(());
        }
        let seed = match order {
            Order::InTurn => 0,
            // Any number but 0 will do.
            Order::Shuffled(seed) => 0x9e37_79b9_7f4a_7c15 ^ u64::from(seed),
        };
        let dynamic_smem = self.kernel.spec().dynamic_smem;
        let grid = Grid { blocks: launch.grid, threads: launch.block, dynamic_smem, seed };
        let _alone = self.program.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `launch.h` defines it so.
        let run: unsafe extern "C" fn(*const c_void, *const Grid) -> *const c_char =
            unsafe { std::mem::transmute(self.program.function(c"emulated_launch")) };
        // SAFETY: the caller vouches for `params`; one launch runs at a time.
        let message = unsafe { run(std::ptr::from_ref(params).cast(), &raw const grid) };
        if message.is_null() {
            return Ok(());
        }
        // SAFETY: a static buffer that the next launch will change.
        Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
    }

    /// As [`Self::try_launch`]; panics where that fails.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn launch(&self, params: &K::Params, order: Order) {
        // SAFETY: the caller vouches for it.
        let result = unsafe { self.try_launch(params, order) };
        result.unwrap_or_else(|error| panic!("{}: {error}", self.kernel.spec()));
    }
}

/// As `launch.h` has it.
#[repr(C)]
struct Grid {
    blocks: [u32; 3],
    threads: [u32; 3],
    dynamic_smem: u32,
    seed: u64,
}

/// A shared library that stays loaded.
struct Program {
    handle: *mut c_void,
    /// Its threads and shared memory are static: one launch at a time.
    in_use: Mutex<()>,
}

// SAFETY: the handle is only read, by functions that may be called from any thread.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

impl Program {
    /// Tests run side by side: who needs the same program waits for it.
    fn of(spec: &KernelSpec, arch: Arch) -> Option<&'static Self> {
        static PROGRAMS: LazyLock<Mutex<HashMap<u64, &'static OnceLock<Program>>>> =
            LazyLock::new(Mutex::default);
        let compiler = compiler()?;
        let text = text(spec, arch);
        let mut hash = DefaultHasher::new();
        (&text, HEADERS, OPTIONS, compiler).hash(&mut hash);
        let key = hash.finish();
        let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let program = *programs.entry(key).or_insert_with(|| Box::leak(Box::default()));
        drop(programs);
        Some(program.get_or_init(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
            let library = folder.join(format!("{}-{key:016x}.so", spec.entry));
            if !library.exists() {
                compile(compiler, spec, &text, &library);
            }
            Self::load(&library)
        }))
    }

    fn load(library: &Path) -> Self {
        let name = CString::new(library.to_str().expect("a path in UTF-8")).unwrap();
        // SAFETY: a library of ours; loading it runs nothing but initialisers of its variables.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} does not load", library.display());
        Self { handle, in_use: Mutex::new(()) }
    }

    fn function(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library stays loaded.
        let function = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?} is missing");
        function
    }
}

/// Products and sums are left as they are written, for a launch to give the same everywhere.
const OPTIONS: [&str; 8] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-Wno-psabi",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
];

fn compiler() -> Option<&'static str> {
    static FOUND: LazyLock<Option<&'static str>> = LazyLock::new(|| {
        let answers = |name: &str| Command::new(name).arg("--version").output().is_ok();
        let found = ["c++", "g++", "clang++"].into_iter().find(|name| answers(name));
        let is_required = std::env::var_os("INFLIGHT_REQUIRE_TOOLS").is_some();
        assert!(found.is_some() || !is_required, "no C++ compiler: install g++");
        found
    });
    if FOUND.is_none() {
        println!("skipped: no C++ compiler (c++, g++ or clang++)");
    }
    *FOUND
}

/// The whole translation unit. Macros come after the emulator's headers, which know none of them.
fn text(spec: &KernelSpec, arch: Arch) -> String {
    let arch: String = arch.name().chars().filter(char::is_ascii_digit).collect();
    let mut text = format!("#include \"launch.h\"\n#define __CUDA_ARCH__ {arch}0\n");
    for (name, value) in &spec.defines {
        text += &format!("#define {name} {value}\n");
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
    let read = |name: &str| fs::read_to_string(sources.join(name)).expect("a header of csrc/");
    text += &translate(spec.source.file, spec.source.text, &read);
    text += "#undef __cluster_dims__\n#define __cluster_dims__ .of\n";
    text + &format!("EMULATED_KERNEL({}, {})\n", spec.entry, head(spec.source.text, spec.entry))
}

fn compile(compiler: &str, spec: &KernelSpec, text: &str, library: &Path) {
    static HEADERS_ARE_THERE: Once = Once::new();
    HEADERS_ARE_THERE.call_once(|| {
        for (name, text) in HEADERS {
            place(&library.with_file_name(name), text);
        }
    });
    let source = library.with_extension("cpp");
    place(&source, text);
    let new = unfinished(library);
    let command = Command::new(compiler).args(OPTIONS).arg(&source).arg("-o").arg(&new).output();
    let output = command.expect("the compiler starts");
    assert!(
        output.status.success(),
        "{spec} is not C++ for the host (a function that is not declared is one that \
         tests/emulated/cuda/ lacks; ptx_… is an instruction):\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    fs::rename(new, library).unwrap();
}

/// Another process may do the same: files appear whole.
fn place(file: &Path, text: &str) {
    fs::create_dir_all(file.parent().expect("a file in a folder")).unwrap();
    let new = unfinished(file);
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

fn unfinished(file: &Path) -> PathBuf {
    file.with_extension(format!("{}.new", std::process::id()))
}
