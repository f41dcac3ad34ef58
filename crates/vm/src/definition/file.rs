//! The text of a definition's file.

use aquifer_page::RegionName;

use super::{Definition, VERSION};

/// Returns the text of a definition, with comments for its readers.
pub(super) fn text(definition: &Definition) -> Result<String, toml::ser::Error> {
    let name = &definition.name;
    let body = toml::to_string(definition)?;
    Ok(format!(
        "# The definition of VM '{name}'. 'aquifer vm set {name}' changes it, and so can you:\n\
         # what you write in [vm] counts when the VM starts next. [vm] takes the long options of\n\
         # 'aquifer vm create', with _ for -. The commands that write this file keep no other\n\
         # comments.\n{body}"
    ))
}

/// Reads the text of the definition of `name`; the error names line and key, and the way out.
pub(super) fn parse(name: &RegionName, text: &str) -> Result<Definition, String> {
    let version = toml::from_str::<toml::Table>(text).ok().and_then(|table| {
        let version = table.get("version")?.as_integer()?;
        (version > i64::from(VERSION)).then_some(version)
    });
    if let Some(version) = version {
        return Err(format!(
            "its version is {version}, and this program knows only {VERSION}: install a newer \
             Aquifer"
        ));
    }
    let damaged =
        |why: &str| format!("{why}; correct the file, or remove it with 'aquifer vm rm {name}'");
    let definition: Definition =
        toml::from_str(text).map_err(|error| damaged(error.to_string().trim_end()))?;
    if definition.name != *name {
        return Err(damaged(&format!("it is the definition of '{}'", definition.name)));
    }
    Ok(definition)
}
