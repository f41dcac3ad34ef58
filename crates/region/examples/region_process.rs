//! The smallest program that can serve regions: the hidden subcommand of `aquifer`, by itself.

use std::env;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use aquifer_page::RegionName;
use aquifer_region::process::{SUBCOMMAND, run};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1 + SUBCOMMAND.len()).collect();
    let [role, directory, name] = &args[..] else { return Err("only Aquifer runs this".into()) };
    let name: RegionName = name.parse()?;
    Ok(run(role, Path::new(directory), &name))
}
