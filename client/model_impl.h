// What is behind a Model.
#pragma once

#include <memory>

#include "client/client.h"
#include "client/keeper.h"
#include "client/opened_model.h"

namespace ashlar {

struct Model::Impl {
  std::shared_ptr<internal::Keeper> keeper;
  std::shared_ptr<internal::OpenedModel> opened;

  // The model's handles on the connection of now.
  absl::StatusOr<internal::ModelBinding> Bind() const {
    if (absl::Status status = keeper->CheckProcess(); !status.ok()) return status;
    return opened->binding();
  }
};

}  // namespace ashlar
