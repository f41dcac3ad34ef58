//! Defined VMs, as `aquifer vm list --all` and `aquifer vm show` print them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use aquifer_control::restart::Policy;
use aquifer_page::RegionName;
use aquifer_vm::definition::{Definition, DefinitionError};
use aquifer_vm::process::NextStart;
use serde::Serialize;

use super::place::Place;
use crate::failure::{OrFail, Result};

/// A VM that is defined here.
#[derive(Debug, Serialize)]
pub(super) struct Defined {
    pub(super) name: RegionName,
    /// Its state if it does not run.
    pub(super) state: String,
    definition: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    autostart: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restart: Option<Policy>,
    /// Why the VM stays off.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_by: Option<String>,
    /// When and why the agent starts the VM again.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_start: Option<NextStart>,
}

impl Defined {
    fn new(
        place: &Place<'_>,
        name: RegionName,
        definition: Result<Definition, DefinitionError>,
    ) -> Self {
        let files = place.files(&name);
        let next_start = files.next_start();
        let state = match &definition {
            Err(error) => format!("damaged: {error}"),
            Ok(Definition { elsewhere: Some(elsewhere), .. }) => elsewhere.describe(),
            Ok(_) if files.is_at_rest() => "stopped".to_owned(),
            Ok(_) if next_start.is_some() => "waits".to_owned(),
            Ok(_) => "off".to_owned(),
        };
        let definition = definition.ok();
        Self {
            state,
            definition: place.definitions.file(&name),
            name,
            autostart: definition.as_ref().map(|definition| definition.autostart),
            restart: definition.as_ref().map(|definition| definition.restart),
            stopped_by: files.why_at_rest(),
            next_start,
        }
    }

    /// Returns the VM's row in a list of VMs.
    pub(super) fn row(&self) -> Vec<String> {
        vec![self.name.to_string(), self.state.clone()]
    }

    /// Returns all VMs that are defined here, in order of their names.
    pub(super) fn all(place: &Place<'_>) -> Result<Vec<Self>> {
        let each = place.definitions.each().or_fail(|| "listing the definitions of VMs")?;
        let defined = |(name, definition)| Self::new(place, name, definition);
        Ok(each.into_iter().map(defined).collect())
    }

    /// Returns the VM of this name, if it is defined here.
    pub(super) fn find(place: &Place<'_>, name: &RegionName) -> Option<Self> {
        let found = place.definitions.find(name).transpose()?;
        Some(Self::new(place, name.clone(), found))
    }

    /// Describes the definition for people, in lines.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| _ = write!(text, "\n{name:<12}{value}");
        line("definition", &self.definition.display().to_string());
        if let Some(autostart) = self.autostart {
            line("autostart", if autostart { "yes" } else { "no" });
        }
        if let Some(restart) = self.restart {
            line("restart", restart.as_str());
        }
        if let Some(why) = &self.stopped_by {
            line("stopped by", why);
        }
        if let Some(next) = &self.next_start {
            let wait = Duration::from_secs(next.wait().as_secs_f64().round() as u64);
            let when = match wait.is_zero() {
                true => "due, if an agent runs".to_owned(),
                false => format!("in {}", humantime::format_duration(wait)),
            };
            line("next start", &format!("{when}: {}", next.why));
        }
        text
    }

    /// Describes a VM that does not run.
    pub(super) fn text_of_absent(&self) -> String {
        format!("vm          {}, {}{}", self.name, self.state, self.text())
    }
}
