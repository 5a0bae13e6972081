//! The NVRTC library: finding it, and the few calls we need.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    path::{Path, PathBuf},
};

use cudarc::nvrtc::sys;

use crate::{KernelError, spec::Source};

/// A loaded NVRTC.
///
/// Any number of threads may compile at once, each a program of its own. Since 12.3 that is faster,
/// too: of version 13.0 only reading a source is left under a lock, 15 ms of some 230.
///
/// # Source
/// NVRTC's documentation, "Thread Safety".
#[derive(Debug)]
pub(crate) struct Nvrtc {
    /// Major and minor number.
    pub(crate) version: (i32, i32),
}

/// One translation unit.
pub(crate) struct Unit<'a> {
    pub(crate) source: Source,
    pub(crate) headers: &'a [Source],
    pub(crate) options: &'a [String],
}

/// What a compilation gave.
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    pub(crate) log: String,
}

/// Why a compilation gave nothing.
pub(crate) enum CompileError {
    /// The source is wrong; the log says why.
    Source(String),
    Library(KernelError),
}

impl Nvrtc {
    /// Loads the library: from `folder` if given, else from where the loader and Python's packages
    /// keep it.
    ///
    /// # Errors
    /// [`KernelError::NoNvrtc`] if there is none, [`KernelError::Nvrtc`] if it does not answer.
    pub(crate) fn load(folder: Option<&Path>) -> Result<Self, KernelError> {
        match folder {
            Some(folder) if !preload(folder) => {
                return Err(KernelError::NoNvrtc { searched: folder.display().to_string() });
            }
            Some(_) => {}
            None if is_present() => {}
            None => {
                python_folders().iter().any(|folder| preload(folder));
            }
        }
        if !is_present() {
            let searched = "the loader's path, CUDA_PATH, /usr/local/cuda, Python's packages";
            return Err(KernelError::NoNvrtc { searched: searched.into() });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is present, and both are valid for writing.
        check("nvrtcVersion", unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        if (major, minor) < (11, 2) {
            let reason = format!("version {major}.{minor} is too old: 11.2 is the least");
            return Err(KernelError::Nvrtc { call: "nvrtcVersion", reason });
        }
        Ok(Self { version: (major, minor) })
    }

    /// Compiles a unit to machine code.
    pub(crate) fn compile(&self, unit: &Unit<'_>) -> Result<Compiled, CompileError> {
        let program = Program::new(unit).map_err(CompileError::Library)?;
        let options: Vec<CString> = unit.options.iter().map(|option| c_string(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program lives, and the options are as many as said.
        let result = unsafe {
            sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.log().map_err(CompileError::Library)?;
        if result == sys::nvrtcResult::NVRTC_ERROR_COMPILATION {
            return Err(CompileError::Source(log));
        }
        check("nvrtcCompileProgram", result).map_err(|error| {
            let KernelError::Nvrtc { call, reason } = error else {
                return CompileError::Library(error);
            };
            CompileError::Library(KernelError::Nvrtc { call, reason: format!("{reason}\n{log}") })
        })?;
        let cubin = program.cubin().map_err(CompileError::Library)?;
        Ok(Compiled { cubin, log })
    }
}

/// A program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(unit: &Unit<'_>) -> Result<Self, KernelError> {
        let source = c_string(unit.source.text);
        let name = c_string(unit.source.file);
        let texts: Vec<CString> = unit.headers.iter().map(|header| c_string(header.text)).collect();
        let names: Vec<CString> = unit.headers.iter().map(|header| c_string(header.file)).collect();
        let texts: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in zero and outlive the call; both lists have the length said.
        let result = unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                texts.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", result)?;
        Ok(Self(program))
    }

    fn log(&self) -> Result<String, KernelError> {
        let mut size = 0;
        // SAFETY: the program lives.
        check("nvrtcGetProgramLogSize", unsafe {
            sys::nvrtcGetProgramLogSize(self.0, &raw mut size)
        })?;
        let mut log = vec![0_u8; size];
        // SAFETY: the library writes the `size` bytes it asked for.
        check("nvrtcGetProgramLog", unsafe {
            sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast())
        })?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, KernelError> {
        let mut size = 0;
        // SAFETY: the program lives.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) })?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the library writes the `size` bytes it asked for.
        check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) })?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: nobody uses the program any more. An error leaves nothing to be done.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<(), KernelError> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the library gives a static text for every result.
    let reason = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    Err(KernelError::Nvrtc { call, reason: reason.to_string_lossy().into_owned() })
}

/// Whether the loader finds the library by its name, or it is already in the process.
fn is_present() -> bool {
    // SAFETY: only tries to open libraries by name.
    unsafe { sys::is_culib_present() }
}

/// Opens the library in `folder`, for good: whoever asks for its bare name later gets this one.
fn preload(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    // Builtins first: the other library looks for them by their bare name.
    files.sort();
    let mut opened = false;
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let is_builtins = name.starts_with("libnvrtc-builtins.so");
        let is_library = name.starts_with("libnvrtc.so");
        if !is_builtins && !is_library {
            continue;
        }
        let Ok(path) = CString::new(file.as_os_str().as_encoded_bytes()) else { continue };
        // SAFETY: loading NVIDIA's libraries runs no code but their own initialisers.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        opened |= is_library && !handle.is_null();
    }
    opened
}

/// Where toolkits and Python's wheels put the library when the loader does not know of it.
fn python_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["CUDA_PATH", "CUDA_HOME"] {
        if let Some(path) = std::env::var_os(variable) {
            folders.push(Path::new(&path).join("lib64"));
        }
    }
    folders.push("/usr/local/cuda/lib64".into());
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let prefixes = prefixes.map(PathBuf::from).chain(home);
    for prefix in prefixes.chain(["/usr/local".into(), "/usr".into()]) {
        let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else { continue };
        for entry in entries.filter_map(Result::ok) {
            if entry.file_name().to_string_lossy().starts_with("python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let nvidia = entry.path().join(packages).join("nvidia");
                    folders.push(nvidia.join("cu13/lib"));
                    folders.push(nvidia.join("cuda_nvrtc/lib"));
                }
            }
        }
    }
    folders
}

/// Our own texts, none of which has a zero in it.
fn c_string(text: &str) -> CString {
    CString::new(text).expect("sources and options contain no zero byte")
}
