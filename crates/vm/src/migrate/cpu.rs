//! The features of a VM's processor. A running guest uses them without checking again, so it must
//! not move to a host that offers less.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::VmError;
use crate::qmp::Qmp;

/// A processor model of QEMU that stands for all features of the host and its accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// QEMU's name of the model: `host` or `max`.
    model: String,
    vendor: String,
    family: u64,
    number: u64,
    /// QEMU's names of the features.
    flags: BTreeSet<String>,
}

impl Cpu {
    /// Expands `model` on this host.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub(crate) fn of(qmp: &mut Qmp, model: &str) -> Result<Self, VmError> {
        let expand = json!({ "type": "full", "model": { "name": model } });
        let answer = qmp.execute("query-cpu-model-expansion", expand)?;
        Ok(Self::from_properties(model, &answer["model"]["props"]))
    }

    fn from_properties(model: &str, properties: &Value) -> Self {
        let number = |name: &str| properties[name].as_u64().unwrap_or(0);
        let set = properties.as_object().into_iter().flatten().filter(|(_, value)| **value == true);
        Self {
            model: model.to_owned(),
            vendor: properties["vendor"].as_str().unwrap_or("unknown").to_owned(),
            family: number("family"),
            number: number("model"),
            // QEMU has several spellings of some names.
            flags: set.map(|(name, _)| name.replace(['_', '.'], "-")).collect(),
        }
    }

    /// Checks that a guest that runs on `there` can run here. The error names the missing features
    /// and the way out.
    pub(super) fn check_takes(&self, there: &Self) -> Result<(), VmError> {
        let missing: Vec<_> = there.flags.difference(&self.flags).map(String::as_str).collect();
        let why = if self.vendor != there.vendor {
            format!("its vendor is {}, and the source's is {}", self.vendor, there.vendor)
        } else if missing.is_empty() {
            return Ok(());
        } else {
            format!("it lacks {}", missing.join(", "))
        };
        Err(VmError::UnlikeCpu {
            model: there.model.clone(),
            here: format!("family {}, model {}", self.family, self.number),
            there: format!("family {}, model {}", there.family, there.number),
            why,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: &str, flags: &[&str]) -> Cpu {
        let mut properties = json!({ "vendor": vendor, "family": 6, "model": 85, "hle": false });
        flags.iter().for_each(|flag| properties[flag] = json!(true));
        Cpu::from_properties("host", &properties)
    }

    #[test]
    fn a_guest_moves_only_to_a_processor_that_offers_as_much() {
        let small = cpu("GenuineIntel", &["avx2", "sse4.2"]);
        let large = cpu("GenuineIntel", &["avx2", "sse4_2", "avx512f", "amx-tile"]);
        assert!(small.check_takes(&small).is_ok() && large.check_takes(&small).is_ok());
        let refused = small.check_takes(&large).unwrap_err().to_string();
        assert!(refused.contains("it lacks amx-tile, avx512f"), "{refused}");
        assert!(refused.contains("--cpu"), "{refused}");
        let other = cpu("AuthenticAMD", &["avx2", "sse4.2"]);
        let refused = other.check_takes(&small).unwrap_err().to_string();
        assert!(
            refused.contains("vendor is AuthenticAMD, and the source's is GenuineIntel"),
            "{refused}"
        );
    }
}
