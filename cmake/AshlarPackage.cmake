# SPDX-License-Identifier: Apache-2.0
# The Debian package: `cpack -G DEB` in the build folder, from what component node installs and what a distribution adds
# (component debian): unit, configuration, manual pages, completions, rules, dashboards.
set(debian ${PROJECT_SOURCE_DIR}/deploy/debian)

install(FILES deploy/systemd/ashlard.service DESTINATION /lib/systemd/system COMPONENT debian)
install(FILES ${debian}/ashlard.yaml DESTINATION /etc/ashlar COMPONENT debian)
install(FILES ${debian}/copyright README.md SECURITY.md docs/runbooks.md docs/sizing.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT debian)
# Programs that compute a cache's savings from a log (sizing.md).
install(TARGETS ashlar-replay RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT debian)
install(PROGRAMS tools/sizing DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME ashlar-sizing COMPONENT debian)
install(PROGRAMS tools/trace-from-log DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME ashlar-trace-from-log COMPONENT debian)
install(FILES deploy/prometheus/ashlar.rules.yml deploy/prometheus/prometheus.example.yml
  deploy/prometheus/prometheus.kubernetes.example.yml DESTINATION ${CMAKE_INSTALL_DATADIR}/ashlar/prometheus COMPONENT debian)
# A script writes the dashboards, and the programs write manual pages and completions, at installation.
install(CODE "execute_process(COMMAND python3 ${PROJECT_SOURCE_DIR}/deploy/grafana/make_dashboards.py
  \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/ashlar/grafana COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT debian)
install(CODE "execute_process(COMMAND sh ${debian}/write_pages.sh $<TARGET_FILE:ashlard> $<TARGET_FILE:ashlarctl>
  ${PROJECT_SOURCE_DIR}/CHANGELOG.md \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT debian)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ashlar)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_VENDOR Ashlar)
# The field is required. The address is not read: SECURITY.md says where reports go.
set(CPACK_PACKAGE_CONTACT "Ashlar maintainers <maintainers@users.noreply.a-seed-bb79b9ed.example>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "cache daemon for the inference state of language models")
set(CPACK_PACKAGE_DESCRIPTION "Inference engines set prompts from segments that were computed earlier,
at any position, and compute only what lies between. The package has the
daemon of a node (ashlard) and the operator's tool (ashlarctl).")
set(CPACK_COMPONENTS_ALL node debian)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "adduser, python3")  # of ashlar-sizing and ashlar-trace-from-log
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
if(UCX_ROOT)  # no package has these
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${UCX_ROOT}/lib)
endif()
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  "${debian}/conffiles;${debian}/postinst;${debian}/prerm;${debian}/postrm")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/AshlarPackageTimes.cmake)
include(CPack)
