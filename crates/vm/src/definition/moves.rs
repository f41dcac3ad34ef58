//! The definition of a VM that moves from host to host.

use aquifer_page::RegionName;

use super::{Definition, DefinitionError, Definitions, Direction, Elsewhere, Held};
use crate::error::VmError;
use crate::migrate::{HandedOver, Incoming};
use crate::process::Files;

/// Holds the definition of a VM, if the VM was started from one that still exists.
pub(crate) fn hold(files: &Files) -> Result<Option<Held>, VmError> {
    let Some(path) = files.definition()? else { return Ok(None) };
    let definitions = Definitions::beside(&path);
    if definitions.find(files.name())?.is_none() {
        return Ok(None);
    }
    Ok(Some(definitions.hold(files.name())?))
}

/// Returns the text of the definition for the host to which the VM moves.
///
/// # Errors
/// If the definition cannot be read: the VM would lose it.
pub(crate) fn text(files: &Files) -> Result<Option<String>, VmError> {
    let Some(path) = files.definition()? else { return Ok(None) };
    let Some(definition) = Definitions::beside(&path).find(files.name())? else { return Ok(None) };
    let mut definition = Definition { elsewhere: None, ..definition };
    // The other host's nodes have other numbers.
    definition.vm.retain(|option, value| option != "node" || value.as_str() == Some("any"));
    let text = definition.text();
    text.map(Some).map_err(|error| VmError::Reported(error.to_string()))
}

impl Definitions {
    /// Writes the definition that a VM brings, marked so that nothing starts it. The VM's record
    /// exists, so that no other attempt to move it here does the same.
    ///
    /// # Errors
    /// [`DefinitionError::Exists`] if this host has a definition of the name that is not marked:
    /// that VM is another one. [`DefinitionError::Malformed`] if the text is no definition.
    pub(crate) fn expect(
        &self,
        name: &RegionName,
        incoming: &Incoming,
        text: &str,
    ) -> Result<(), DefinitionError> {
        let (held, path) = (self.hold(name)?, self.file(name));
        if held.find()?.is_some_and(|definition| definition.elsewhere.is_none()) {
            return Err(DefinitionError::Exists { name: name.clone(), path });
        }
        let malformed = |why| DefinitionError::Malformed { name: name.clone(), path, why };
        let definition = Definition::parse(name, text).map_err(malformed)?;
        held.write(&definition.moved(Elsewhere::from(incoming)))
    }

    /// Removes the definition of a VM that did not arrive.
    pub(crate) fn remove_expected(&self, name: &RegionName, incoming: &Incoming) {
        self.remove_marked(name, &Elsewhere::from(incoming));
    }

    fn remove_marked(&self, name: &RegionName, mark: &Elsewhere) {
        let remove = || {
            let held = self.hold(name)?;
            match held.find()? {
                Some(definition) if definition.elsewhere.as_ref() == Some(mark) => held.remove(),
                _ => Ok(()),
            }
        };
        if let Err(error) = remove() {
            tracing::warn!("a definition stays that 'aquifer vm rm {name}' removes: {error}");
        }
    }
}

impl Held {
    /// Marks the definition of a VM that this host is about to hand over.
    ///
    /// # Errors
    /// [`DefinitionError`] if that does not survive a loss of power: the VM must then stay.
    pub(crate) fn leave(&self, handed_over: &HandedOver) -> Result<(), DefinitionError> {
        let Some(definition) = self.find()? else { return Ok(()) };
        self.write(&definition.moved(Elsewhere::to(handed_over)))
    }

    /// Removes the mark if the VM runs here and belongs to this host.
    ///
    /// # Errors
    /// [`DefinitionError`] if the definition cannot be read or written.
    pub fn settle(&self, files: &Files) -> Result<(), DefinitionError> {
        match self.find()? {
            Some(definition) if definition.elsewhere.is_some() && files.is_here() => {
                self.write(&Definition { elsewhere: None, ..definition })
            }
            _ => Ok(()),
        }
    }
}

/// Removes the mark of a VM that is here, and logs a failure: the agent repeats this.
pub(crate) fn settle(files: &Files) {
    let settled = hold(files).and_then(|held| Ok(held.map_or(Ok(()), |held| held.settle(files))?));
    if let Err(error) = settled {
        tracing::warn!("the VM does not start at boot until its definition is unmarked: {error}");
    }
}

/// Removes the definition of a VM that the other host has, with its definition.
pub(crate) fn remove_moved(files: &Files, handed_over: &HandedOver) {
    if handed_over.defined
        && let Ok(Some(path)) = files.definition()
    {
        let mark = Elsewhere::to(handed_over);
        Definitions::beside(&path).remove_marked(files.name(), &mark);
    }
}

impl Definition {
    /// Marks the definition of a VM that moves. Wherever the VM starts next, lenders must not take
    /// it for the one before the move.
    fn moved(self, elsewhere: Elsewhere) -> Self {
        let moves = self.moves.saturating_add(1);
        Self { moves, elsewhere: Some(elsewhere), ..self }
    }
}

impl Elsewhere {
    fn to(HandedOver { migration, to, .. }: &HandedOver) -> Self {
        Self { migration: *migration, direction: Direction::To, host: to.clone() }
    }

    fn from(Incoming { migration, from, .. }: &Incoming) -> Self {
        Self { migration: *migration, direction: Direction::From, host: from.clone() }
    }
}
