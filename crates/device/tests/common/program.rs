use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The program that volume processes are: an example. `make test` builds all examples first; where nobody did, it is
/// built now.
pub fn volume_process() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        // This test is target/PROFILE/deps/NAME.
        let test = env::current_exe().unwrap();
        let program = test.ancestors().nth(2).unwrap().join("examples/volume_process");
        if !program.exists() {
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "--quiet", "--package", "aquifer-device", "--example", "volume_process"]);
            if !cfg!(debug_assertions) {
                build.arg("--release");
            }
            let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
            assert!(
                built.unwrap().success() && program.exists(),
                "the example volume_process does not build"
            );
        }
        program
    })
}
