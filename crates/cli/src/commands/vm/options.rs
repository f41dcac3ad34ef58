//! The options of a VM as the command line gives them, and as its definition keeps them.
//!
//! A definition has the long names of options with `_` for `-`. To read it, this module makes a
//! command line of it: so both have one parser.

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use aquifer_page::{OwnerId, RegionName};
use aquifer_vm::definition::Definition;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use toml::{Table, Value};

use super::guest::Guest;
use crate::commands::region::has_cache;
use crate::failure::{Failure, Result};

/// The key for the arguments of QEMU, which have no option.
const ARGUMENTS: &str = "arguments";

/// The options of a VM that a command line gives.
#[derive(Debug)]
pub(super) struct Options {
    /// All options, with defaults.
    pub(super) guest: Guest,
    /// Those that are given, as a definition has them.
    pub(super) given: Table,
}

/// The options of a VM whose memory must be given.
#[derive(Debug)]
pub(super) struct Complete(pub(super) Options);

impl Args for Options {
    fn augment_args(command: Command) -> Command {
        Guest::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Options {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        Ok(Self { guest: Guest::from_arg_matches(matches)?, given: given(matches)? })
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Complete {
    fn augment_args(command: Command) -> Command {
        Options::augment_args(command).mut_arg("memory", |memory| memory.required(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Complete {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        Options::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// Changes of a VM's options: those that one option requires may be in the definition already.
#[derive(Debug)]
pub(super) struct Changes(pub(super) Table);

impl Args for Changes {
    fn augment_args(command: Command) -> Command {
        let free = |(_, option): (String, Arg)| {
            let mut free = Arg::new(option.get_id().clone())
                .action(option.get_action().clone())
                .value_parser(option.get_value_parser().clone())
                .last(option.is_last_set());
            free = option.get_long().map(str::to_owned).into_iter().fold(free, Arg::long);
            let names: Vec<_> = option.get_value_names().unwrap_or_default().to_vec();
            free = if names.is_empty() { free } else { free.value_names(names) };
            let help = option.get_help().cloned();
            let long = option.get_long_help().cloned();
            free = help.into_iter().fold(free, Arg::help);
            long.into_iter().fold(free, Arg::long_help)
        };
        let kept = all().into_iter().filter(|(key, _)| key != "take_over");
        command.args(kept.map(free))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Changes {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        given(matches).map(Self)
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        self.0 = given(matches)?;
        Ok(())
    }
}

/// Returns all options of a VM, by their keys.
fn all() -> Vec<(String, Arg)> {
    let command = Guest::augment_args(Command::new(""));
    let keyed = |option: &Arg| {
        let long = option.get_long().map(|long| long.replace('-', "_"));
        (long.unwrap_or_else(|| ARGUMENTS.to_owned()), option.clone())
    };
    command.get_arguments().map(keyed).collect()
}

/// Options that an agent passes by variables to the VMs that it starts.
const AGENTS_OWN: [&str; 2] = ["socket", "groups"];

/// Returns the given options as a definition has them: paths are absolute, as the agent that starts
/// the VM has another working directory.
fn given(matches: &ArgMatches) -> std::result::Result<Table, clap::Error> {
    let mut given = Table::new();
    let sets_cache = matches.value_source("cache").is_some() && has_cache(matches);
    for (key, option) in all() {
        let id = option.get_id().as_str();
        let Ok(Some(raw)) = matches.try_get_raw(id) else { continue };
        match matches.value_source(id) {
            Some(ValueSource::CommandLine) => {}
            // The agent has other variables, and its own places: the VM may move to its host.
            Some(ValueSource::EnvVariable) if sets_cache && !AGENTS_OWN.contains(&id) => {}
            _ => continue,
        }
        let is_path = option.get_value_parser().type_id() == TypeId::of::<PathBuf>();
        // QEMU without a directory is found by PATH.
        let is_path =
            |raw: &OsStr| is_path && (id != "qemu" || raw.as_encoded_bytes().contains(&b'/'));
        let values: Vec<_> = raw.map(|raw| value(raw, is_path(raw))).collect::<Result<_, _>>()?;
        let value = match option.get_action() {
            ArgAction::SetTrue => Some(Value::Boolean(true)),
            ArgAction::Append => Some(Value::Array(values)),
            _ => values.into_iter().next(),
        };
        given.extend(value.map(|value| (key, value)));
    }
    Ok(given)
}

fn value(raw: &OsStr, is_path: bool) -> std::result::Result<Value, clap::Error> {
    let refused = |why: String| clap::Error::raw(ErrorKind::InvalidUtf8, why + "\n");
    let path = if is_path { std::path::absolute(raw).ok() } else { None };
    let text = path.as_ref().map_or(raw, |path| path.as_os_str()).to_str();
    let text = text.ok_or_else(|| refused(format!("'{}' is not UTF-8", raw.to_string_lossy())))?;
    Ok(match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    })
}

/// Reads the options of a definition in `file`.
///
/// # Errors
/// If a key is unknown, or a value invalid: the error names key and file.
pub(super) fn read(table: &Table, file: &Path) -> Result<Options> {
    let refused = |why: String| Failure::new(format!("reading {}", file.display()), why);
    let line = line(table).map_err(refused)?;
    let command = Guest::augment_args(Command::new("").no_binary_name(true));
    let read =
        command.try_get_matches_from(line).and_then(|matches| Options::from_arg_matches(&matches));
    read.map_err(|error| {
        let text = error.render().to_string();
        let why = text.lines().take_while(|line| !line.is_empty());
        let why = why.map(str::trim).collect::<Vec<_>>().join(" ");
        refused(format!("in [vm], {}", why.trim_start_matches("error: ")))
            .help("change it with 'aquifer vm set', or edit the file")
    })
}

/// Returns the command line that gives the options of a definition.
fn line(table: &Table) -> std::result::Result<Vec<OsString>, String> {
    let all = all();
    let (mut line, mut arguments) = (Vec::new(), Vec::new());
    for (key, value) in table {
        let Some((_, option)) = all.iter().find(|(known, _)| known == key) else {
            let known: Vec<_> = all.iter().map(|(key, _)| key.as_str()).collect();
            return Err(format!("unknown key '{key}' in [vm]; it may have {}", known.join(", ")));
        };
        let values = match value {
            Value::Array(values) => values.iter().map(|value| word(key, value)).collect(),
            value => word(key, value).map(|word| vec![word]),
        }?;
        let is_flag = matches!(option.get_action(), ArgAction::SetTrue);
        match option.get_long() {
            None => arguments.extend(values.into_iter().map(OsString::from)),
            Some(long) if is_flag && *value == Value::Boolean(true) => {
                line.push(format!("--{long}").into());
            }
            Some(_) if is_flag && *value == Value::Boolean(false) => {}
            Some(_) if is_flag => return Err(format!("'{key}' in [vm] must be true or false")),
            Some(long) => {
                line.extend(values.iter().map(|value| format!("--{long}={value}").into()));
            }
        }
    }
    line.push("--".into());
    line.append(&mut arguments);
    Ok(line)
}

fn word(key: &str, value: &Value) -> std::result::Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Ok(value.to_string()),
        _ => Err(format!("'{key}' in [vm] must be a text, a number or an array of texts")),
    }
}

/// Returns the definition of a VM with these options.
pub(super) fn definition(name: &RegionName, options: &Options) -> Definition {
    let mut definition = Definition::new(name.clone(), options.given.clone());
    // What is true once only is no part of the definition.
    definition.vm.remove("take_over");
    definition.owner = options.guest.is_pooled().then(OwnerId::random);
    definition
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given_by(line: &[&str]) -> Table {
        let command = Guest::augment_args(Command::new("").no_binary_name(true));
        let matches = command.try_get_matches_from(line).unwrap();
        Options::from_arg_matches(&matches).unwrap().given
    }

    #[test]
    fn a_definition_gives_back_what_the_command_line_gave() {
        let line = [
            "--memory=8G",
            "--cpus=4",
            "--disk=/a.qcow2",
            "--disk=/b",
            "--cache=2G",
            "--lender=nbds://b/",
            "--unencrypted",
            "--append=007",
            "--kernel=/k",
            "--min=64M",
            "--",
            "-nic",
            "user",
        ];
        let given = given_by(&line);
        assert_eq!(given["cpus"], Value::Integer(4));
        assert_eq!(given["append"], Value::String("007".to_owned()));
        assert_eq!(given["unencrypted"], Value::Boolean(true));
        assert_eq!(given[ARGUMENTS].as_array().unwrap().len(), 2);
        assert!(!given.contains_key("policy") && !given.contains_key("qemu"), "{given:?}");
        let text = toml::to_string(&given).unwrap();
        let again = read(&toml::from_str(&text).unwrap(), Path::new("/x.toml")).unwrap();
        assert_eq!(again.given, given);
        assert!(again.guest.is_pooled());
    }

    #[test]
    fn the_memory_of_a_vm_is_a_region_unless_told_otherwise() {
        for (line, is_region) in [
            (&["--memory=8G"][..], true),
            (&["--memory=8G", "--cache=auto"], true),
            (&["--memory=8G", "--max-memory=16G", "--reserve=1G"], true),
            (&["--memory=8G", "--group=blue"], true),
            (&["--memory=8G", "--cache=none"], false),
            (&["--memory=8G", "--huge-pages=2M"], false),
            (&["--memory=8G", "--huge-pages=2M", "--cache=none"], false),
            (&["--memory=8G", "--lender=nbds://b/"], true),
        ] {
            let again = read(&given_by(line), Path::new("/x.toml")).unwrap();
            assert_eq!(again.guest.is_pooled(), is_region, "{line:?}");
            assert_eq!(again.guest.cache().is_some(), is_region, "{line:?}");
        }
    }

    #[test]
    fn paths_in_a_definition_are_absolute_and_programs_are_not() {
        let given = given_by(&["--memory=1G", "--disk=some.img", "--qemu=qemu", "--disk=./b"]);
        let here = std::env::current_dir().unwrap();
        let path = |name: &str| Value::String(here.join(name).to_str().unwrap().to_owned());
        assert_eq!(given["disk"], Value::Array(vec![path("some.img"), path("b")]));
        assert_eq!(given["qemu"], Value::String("qemu".to_owned()));
    }

    #[test]
    fn a_wrong_definition_is_refused_by_key_and_file() {
        for (text, says) in [
            ("memoy = '8G'", "unknown key 'memoy'"),
            ("memory = '8 parsec'", "'8 parsec' is not a size"),
            ("memory = '8G'\nunencrypted = 'yes'", "'unencrypted' in [vm] must be true or false"),
            ("memory = '8G'\ndisk = [{}]", "'disk' in [vm] must be a text"),
            ("memory = '8G'\ncache = 'none'\ngroup = 'blue'", "--group needs a cache"),
            ("memory = '8G'\nhuge_pages = '2M'\ngroup = 'blue'", "--group needs a cache"),
            ("memory = '8G'\nhuge_pages = '2M'\ncache = '2G'", "--huge-pages has no cache"),
            ("memory = '8G'\ninitrd = '/i'", "--kernel"),
        ] {
            let refused = read(&text.parse().unwrap(), Path::new("/d/x.toml")).unwrap_err();
            assert!(refused.what.contains("/d/x.toml"), "{refused}");
            assert!(refused.why.contains(says), "{refused}");
        }
        let flag = read(&"memory = '8G'\nunencrypted = false".parse().unwrap(), Path::new("/x"));
        assert!(!flag.unwrap().given.contains_key("unencrypted"));
    }
}
