//! Finding CUDA's libraries where they usually are, also outside the loader's path.
//!
//! A library loaded once by its absolute path satisfies every later request for its bare name, so
//! loading it here is all that is needed for `cudarc` to find it.

use std::{
    ffi::{CString, OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

/// Major versions of NVRTC and cuBLASLt that are looked for, best first.
const MAJORS: [u32; 1] = [13];

/// Folders that may hold CUDA's libraries: `CUDA_HOME` and its like, the usual places of the
/// toolkit, and the wheels of every Python environment in sight. `variable` reads the environment.
pub fn usual_library_folders(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"]
        .iter()
        .filter_map(|name| variable(name).map(PathBuf::from))
        .collect();
    roots.push("/usr/local/cuda".into());
    roots.extend(entries(Path::new("/usr/local"), "cuda-"));
    let mut folders = Vec::new();
    for root in roots {
        folders.extend(["lib64", "targets/x86_64-linux/lib", "lib"].map(|lib| root.join(lib)));
    }
    folders.push("/usr/lib/x86_64-linux-gnu".into());
    for packages in python_packages(&variable) {
        for wheel in entries(&packages.join("nvidia"), "") {
            folders.push(wheel.join("lib"));
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// `site-packages` and `dist-packages` of the active environment, of the `python3` on the path, of
/// the user and of the system.
fn python_packages(variable: &impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name));
    let mut prefixes: Vec<PathBuf> = named.map(PathBuf::from).collect();
    let path = variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).find(|folder| folder.join("python3").exists());
    prefixes.extend(python.and_then(|folder| folder.parent().map(Path::to_owned)));
    prefixes.extend(variable("HOME").map(|home| PathBuf::from(home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut packages = Vec::new();
    for prefix in prefixes {
        for python in entries(&prefix.join("lib"), "python3") {
            packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
        }
    }
    packages
}

/// Entries of `folder` whose names begin with `prefix`, in descending order: newer versions first.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(read) = fs::read_dir(folder) else { return Vec::new() };
    let matches = |name: &OsStr| name.to_string_lossy().starts_with(prefix);
    let mut paths: Vec<PathBuf> = read
        .filter_map(|entry| entry.ok().filter(|entry| matches(&entry.file_name())))
        .map(|entry| entry.path())
        .collect();
    paths.sort_by(|a, b| b.cmp(a));
    paths
}

/// Loads NVRTC, with the library of built-in functions that it looks for by bare name, from the
/// first of `folders` that has it.
pub(super) fn preload_nvrtc(folders: &[PathBuf]) -> bool {
    MAJORS.iter().any(|major| {
        folders.iter().any(|folder| {
            let loaded = load(&folder.join(format!("libnvrtc.so.{major}")));
            if loaded {
                for builtins in entries(folder, &format!("libnvrtc-builtins.so.{major}")) {
                    load(&builtins);
                }
            }
            loaded
        })
    })
}

/// Loads cuBLASLt from the first of `folders` that has it.
pub(super) fn preload_cublaslt(folders: &[PathBuf]) -> bool {
    MAJORS.iter().any(|major| {
        folders.iter().any(|folder| load(&folder.join(format!("libcublasLt.so.{major}"))))
    })
}

/// Loads a library for the rest of the process; whether that went well.
fn load(path: &Path) -> bool {
    if !path.exists() {
        return false;
    }
    let Ok(name) = CString::new(path.as_os_str().as_encoded_bytes()) else { return false };
    // SAFETY: `name` ends with a zero byte. Loading runs the library's initialisers, which is what
    // loading it by its bare name would do; it is never unloaded.
    !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_and_toolkits_are_found_and_the_newest_comes_first() {
        let root = std::env::temp_dir().join(format!("inflight-libraries-{}", std::process::id()));
        let wheel = root.join("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        let toolkit = root.join("toolkit/lib64");
        for folder in [&wheel, &toolkit] {
            fs::create_dir_all(folder).unwrap();
        }
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            "CUDA_HOME" => Some(root.join("toolkit").into_os_string()),
            _ => None,
        };
        let folders = usual_library_folders(variable);
        assert_eq!(folders.first(), Some(&toolkit));
        assert!(folders.contains(&wheel));
        assert!(folders.iter().all(|folder| folder.is_dir()));

        for name in ["b-12.0", "b-13.0", "c"] {
            fs::create_dir_all(root.join("sorted").join(name)).unwrap();
        }
        let names = entries(&root.join("sorted"), "b-");
        assert_eq!(names, ["b-13.0", "b-12.0"].map(|name| root.join("sorted").join(name)));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_no_library_is_not_loaded() {
        assert!(!load(Path::new("/nonexistent/libnvrtc.so.13")));
        assert!(!load(Path::new("/etc/hostname")));
        assert!(!preload_cublaslt(&[]));
    }
}
