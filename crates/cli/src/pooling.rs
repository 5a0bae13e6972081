//! What an embedding is made of.

use std::path::Path;

use anyhow::{Context, Result, bail};
use inflight_server::Pooling;
use serde_json::Value;

use crate::args::PoolingChoice;

/// What was asked for, or what the model was trained for, where its folder tells.
///
/// # Source
/// sentence-transformers, `models/Pooling.py`: a folder `1_Pooling` beside the model.
pub(crate) fn resolve_pooling(choice: PoolingChoice, model: &Path) -> Result<Pooling> {
    match choice {
        PoolingChoice::Last => return Ok(Pooling::LastToken),
        PoolingChoice::Mean => return Ok(Pooling::Mean),
        PoolingChoice::Auto => {}
    }
    let path = model.join("1_Pooling").join("config.json");
    if !path.is_file() {
        return Ok(Pooling::LastToken);
    }
    let name = path.display();
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {name}"))?;
    let config: Value = serde_json::from_str(&text).with_context(|| format!("{name}: no JSON"))?;
    match (config["pooling_mode_mean_tokens"] == true, config["pooling_mode_lasttoken"] == true) {
        (true, false) => Ok(Pooling::Mean),
        (false, true) => Ok(Pooling::LastToken),
        _ => bail!("{name}: neither the mean nor the last token; choose by --pooling"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_model_tells() {
        let folder = std::env::temp_dir().join(format!("inflight-pooling-{}", std::process::id()));
        let config = folder.join("1_Pooling");
        std::fs::create_dir_all(&config).unwrap();
        let auto = || resolve_pooling(PoolingChoice::Auto, &folder);
        assert_eq!(auto().unwrap(), Pooling::LastToken);
        for (text, expected) in [
            (r#"{"pooling_mode_mean_tokens": true}"#, Some(Pooling::Mean)),
            (r#"{"pooling_mode_lasttoken": true}"#, Some(Pooling::LastToken)),
            (r#"{"pooling_mode_cls_token": true}"#, None),
            ("{", None),
        ] {
            std::fs::write(config.join("config.json"), text).unwrap();
            assert_eq!(auto().ok(), expected, "{text}");
        }
        assert_eq!(resolve_pooling(PoolingChoice::Mean, &folder).unwrap(), Pooling::Mean);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
